"""``atlas completion``: the script that makes a shell complete commands and flags."""

import click
from click.shell_completion import get_completion_class

VARIABLE = "_ATLAS_COMPLETE"
"""Where the script asks its question; click derives it from the name of the program."""


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    r"""Print the completion script of a shell.

    \b
    bash: atlas completion bash > ~/.local/share/bash-completion/completions/atlas
    zsh:  atlas completion zsh > a folder of $fpath, as _atlas
    fish: atlas completion fish > ~/.config/fish/completions/atlas.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise LookupError(f"click has no completion for {shell}")
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "atlas", VARIABLE).source())

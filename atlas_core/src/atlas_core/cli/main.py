"""The ``atlas`` command: finds the subcommand, imports only that one, and turns errors into text and exit codes."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from atlas_core import __version__
from atlas_core.cli.commands import COMMANDS
from atlas_core.cli.elsewhere import advice
from atlas_core.cli.exits import INTERRUPTED, exit_code
from atlas_core.vocab.errors import AtlasError, UsageError


class LazyGroup(click.Group):
    """A group whose help needs no subcommand to be imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the table."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it. Raises click.UsageError with the names that look like an unknown one."""
        near = get_close_matches(args[0], COMMANDS) if args and args[0] not in COMMANDS else []
        if near:
            ctx.fail(f"there is no command {args[0]!r}: did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the one that was asked for; None for an unknown name, which click turns into an error with near names."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(import_module(entry.module), entry.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}.{entry.attribute} is not a click command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and summaries of the table, so that a key press imports no subcommand; then the group's own flags."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        found = [CompletionItem(name, help=COMMANDS[name].summary) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands under their sections, with the summaries of the table."""
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, entry.summary) for name, entry in COMMANDS.items() if entry.section == section]
                )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="atlas")
def atlas() -> None:
    """Atlas: an LLM inference server assembled from plugins."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``atlas`` with ``arguments`` (None: those of the process) and give the exit code; see ``exits`` for the table."""
    try:
        code = atlas.main(arguments, prog_name="atlas", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return exit_code(UsageError(""))
    except click.NoSuchOption as error:
        return _report(_unknown_option(error))
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "atlas"
        return _report(UsageError(error.format_message(), cure=f"{path} --help lists what there is"))
    except click.ClickException as error:
        return _report(UsageError(error.format_message()))
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except AtlasError as error:
        return _report(error)
    return code if isinstance(code, int) else 0


def _unknown_option(error: click.NoSuchOption) -> UsageError:
    """What other servers call so, or the names that look most like it, none of which need be what was meant."""
    path = error.ctx.command_path if error.ctx else "atlas"
    near = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.7)
    cure = (
        advice(error.option_name)
        or f"did you mean {' or '.join(near)}? " * bool(near) + f"{path} --help lists what there is"
    )
    return UsageError(f"{path} has no option {error.option_name}", cure=cure)


def _report(error: AtlasError) -> int:
    click.echo(f"error: {error}", err=True)
    return exit_code(error)

"""The table of settings as flags of a command, and the settings that were given back from them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from atlas_core.assembly.asked import settings_from_environment
from atlas_core.settings import OPTIONS, Option, Settings

F = TypeVar("F", bound=Callable[..., Any])


class SectionedCommand(click.Command):
    """A command whose help groups the settings' flags by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The sections of the table first, then what is the command's own."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                option = OPTIONS.get(param.name or "")
                sections.setdefault(option.section if option else "Other", []).append(record)
        for section in sorted(sections, key=lambda name: name == "Other"):
            with formatter.section(section):
                formatter.write_dl(sections[section])


def settings_options(*names: str) -> Callable[[F], F]:
    """Give a command the flags of the named options (none named: all), MODEL and ``--config``; see ``settings_from``."""
    chosen = [option for name, option in OPTIONS.items() if not names or name in names or name == "model"]

    def decorate(function: F) -> F:
        function = click.option("--config", metavar="FILE", help="Settings file, TOML. [ATLAS_CONFIG]")(function)
        for option in reversed(chosen):
            function = _parameter(option)(function)
        return function

    return decorate


def _parameter(option: Option) -> Callable[[F], F]:
    if option.name == "model":
        return click.argument("model", required=False, shell_complete=_complete_model)
    shown = f"default {option.default}" if option.default not in (None, ()) else f"default: {option.unset}"
    if option.kind.switch:
        # What is on by itself needs a way to be turned off, and as many names for that.
        names = [f"{name}/--no-{name[2:]}" if option.default else name for name in (option.flag, *option.aliases)]
        return click.option(
            *names, option.name, is_flag=True, default=None,
            help=f"{option.help} [{option.variable}; {shown}]",
        )  # fmt: skip
    return click.option(
        option.flag, *option.aliases, option.name, metavar=option.kind.metavar, multiple=option.kind.repeated,
        help=f"{option.help} [{option.variable}; {shown}]",
    )  # fmt: skip


def settings_from(params: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from a command's parameters, the environment (None: the process's) and the settings file, if one is named.

    Raises UsageError for every mistake, and for a file that cannot be read.
    """
    given = {name: params[name] for name in OPTIONS if params.get(name) not in (None, ())}
    flags = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
    return settings_from_environment(flags, environ, params.get("config"))


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the catalogue, then paths, which the shell knows best."""
    from atlas_core.assembly.environment import discover_plugins
    from atlas_core.assembly.model import catalogue

    names = sorted(entry.name for entry in catalogue(discover_plugins()) if entry.name.startswith(incomplete))
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]

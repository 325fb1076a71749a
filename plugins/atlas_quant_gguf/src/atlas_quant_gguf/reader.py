"""The container ``gguf``: one file with configuration, tokenizer and tensors."""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from atlas_core.contracts.checkpoint import Extent, TokenizerSource
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict
from atlas_quant_gguf.ggml import BY_NAME
from atlas_quant_gguf.metadata import MAGIC, GgufHeader, GgufTensor, read_header


class GgufReader:
    """Opens a GGUF file, or a directory that holds exactly one and no config.json."""

    name = "gguf"

    def detect(self, path: Path) -> Verdict:
        """Yes by the first four bytes."""
        try:
            file = _only_file(path)
            with file.open("rb") as opened:
                magic = opened.read(len(MAGIC))
        except CheckpointError as error:
            return Verdict.no(error.why)
        except OSError as error:
            return Verdict.no(error.strerror or str(error))
        if magic != MAGIC:
            return Verdict.no(f"it begins with {magic!r}, not with {MAGIC!r}")
        return Verdict.yes(0, "a GGUF file")

    def open(self, path: Path) -> "GgufCheckpoint":
        """Read and check the header. Raises CheckpointError."""
        return GgufCheckpoint(_only_file(path))

    def reopen(self, path: Path, remembered: bytes) -> "GgufCheckpoint":
        """See contracts.checkpoint.Reopening."""
        try:
            known = msgspec.msgpack.decode(remembered, type=_Remembered)
        except msgspec.MsgspecError as error:
            raise CheckpointError(
                f"what is remembered of {path} is of another kind", str(error), "open it anew"
            ) from error
        return GgufCheckpoint(_only_file(path), known)


class _Remembered(Struct, array_like=True, frozen=True):
    """What a header says, but for metadata."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    consumed: frozenset[str]
    tensors: dict[str, GgufTensor]


class GgufCheckpoint:
    """An opened GGUF file; see contracts.checkpoint.Checkpoint.

    ``quantization`` is empty: what the tensors are stored as is said by their layouts alone.
    """

    naming = "gguf"

    def __init__(self, path: Path, known: _Remembered | None = None) -> None:
        """Read the header, of which all but metadata may be ``known``.

        Raises CheckpointError when the file is not GGUF, is cut, or is of an architecture that is not known.
        """
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._known = known or self._understood()
        except BaseException:
            self._file.close()
            raise
        self.config: Mapping[str, Any] = self._known.config
        self.generation_config: Mapping[str, Any] = self._known.generation_config
        self.quantization: Mapping[str, Any] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.layout.name, tensor.nbytes)
            for tensor in self._known.tensors.values()
            if tensor.name not in self._known.consumed
        }

    @cached_property
    def _header(self) -> GgufHeader:
        with self.path.open("rb") as file:  # of its own, for whoever reads tensors meanwhile
            return read_header(file, self._size, self.path)

    def _understood(self) -> _Remembered:
        from atlas_quant_gguf.config import generation_defaults, hub_config

        config = hub_config(self._header, self.path, self._values)
        defaults = generation_defaults(self._header.metadata, self.path)
        return _Remembered(
            dict(config.values), defaults, frozenset(config.consumed_tensors), dict(self._header.tensors)
        )

    def remembered(self) -> bytes:
        """See contracts.checkpoint.Remembering."""
        return msgspec.msgpack.encode(self._known)

    def layout(self, name: str) -> StorageLayout:
        """The storage layout called ``name``. Raises CheckpointError for one that ggml does not have."""
        try:
            return BY_NAME[name]
        except KeyError:
            raise CheckpointError(f"GGUF has no layout {name!r}", f"it has {', '.join(sorted(BY_NAME))}") from None

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """See contracts.checkpoint.Checkpoint.read."""
        tensor = self._find(name)
        if rows is None:
            return self._read([(tensor.start, tensor.start + tensor.nbytes)])
        # A one-dimensional tensor has a row for each value, unless several share a block.
        count = tensor.shape[0] if len(tensor.shape) > 1 or tensor.layout.block == 1 else 1
        if any(not 0 <= start <= end <= count for start, end in rows):
            raise CheckpointError(f"{name} of {self.path} has {count} rows", f"rows {list(rows)} were asked for")
        width = tensor.nbytes // count
        return self._read([(tensor.start + start * width, tensor.start + end * width) for start, end in rows])

    def extent(self, name: str) -> Extent:
        """See contracts.checkpoint.Located."""
        tensor = self._find(name)
        return Extent(self.path, tensor.start, tensor.nbytes)

    def tokenizer(self) -> TokenizerSource:
        """See contracts.checkpoint.Checkpoint.tokenizer."""
        from atlas_quant_gguf.tokenizer import tokenizer_source  # when a text is read, which is beside the weights

        return tokenizer_source(self._header.metadata, self.path)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def _find(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", "", "name a tensor of this file")
        return self._known.tensors[name]

    def _values(self, name: str) -> memoryview:
        tensor = self._header.tensors[name]
        return self._read([(tensor.start, tensor.start + tensor.nbytes)])

    def _read(self, ranges: Sequence[tuple[int, int]]) -> memoryview:
        view = memoryview(bytearray(sum(end - start for start, end in ranges)))
        filled = 0
        for first, end in ranges:
            start = first
            while start < end:
                try:
                    got = os.preadv(self._file.fileno(), [view[filled : filled + end - start]], start)
                except (OSError, ValueError) as error:
                    raise _unreadable(self.path, error) from error
                if got == 0:
                    raise CheckpointError(
                        f"{self.path} ended at byte {start} while bytes up to {end} were read",
                        f"it had {self._size} bytes when it was opened: something has changed it",
                        "let the download finish, then start again",
                    )
                start += got
                filled += got
        return view


def _only_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file():
        why = "it is a directory with a config.json"
    elif len(files) == 1:
        return files[0]
    else:
        why = f"it is a directory with {len(files)} *.gguf files"
    raise CheckpointError(f"{path} is not a GGUF checkpoint", why, "name the .gguf file itself")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError(f"{path} cannot be read", reason, "check that it exists and who may read it")

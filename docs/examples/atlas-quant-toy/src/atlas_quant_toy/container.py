"""``.toyq8`` files: magic, length of the header (8 bytes, little-endian), header as JSON, then the tensors' bytes.

The header holds ``config`` (in the shape of a Hugging Face config.json), ``generation_config``, ``tokenizer`` (the fields of a
TokenizerSource) and ``tensors``: name → [layout, shape, first byte], counted from the end of the header.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict
from atlas_quant_toy.weights import TOY_Q8, ToyFormat

MAGIC = b"TOYQ8\n"
_LAYOUTS = {layout.name: layout for layout in (TOY_Q8, plain(DType.F32))}


class ToyReader:
    """Opens ``.toyq8`` files."""

    name = "toy"

    def detect(self, path: Path) -> Verdict:
        """Yes for a file that begins with the magic."""
        if not path.is_file():
            return Verdict.no("it is not a file")
        with path.open("rb") as file:
            return Verdict.yes() if file.read(len(MAGIC)) == MAGIC else Verdict.no("it does not begin with TOYQ8")

    def open(self, path: Path) -> "ToyCheckpoint":
        """Read the header. Raises CheckpointError."""
        return ToyCheckpoint(path)


class ToyCheckpoint:
    """An opened file; see contracts.checkpoint.Checkpoint."""

    naming = "hf"
    quantization: Mapping[str, Any] = {}

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the header or a tensor is cut off or malformed."""
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise CheckpointError(f"{path} has no sound header", repr(error), "make the file again") from error
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        start = len(MAGIC) + 8
        length = int.from_bytes(self._bytes(len(MAGIC), 8), "little")
        header = json.loads(bytes(self._bytes(start, length)))
        self.config: Mapping[str, Any] = header["config"]
        self.generation_config: Mapping[str, Any] = header["generation_config"]
        self._tokenizer: Mapping[str, Any] = header["tokenizer"]
        self._first: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, (layout, shape, first) in header["tensors"].items():
            nbytes = self.layout(layout).nbytes(tuple(shape))
            self._first[name] = start + length + first
            self.tensors[name] = TensorInfo(name, tuple(shape), layout, nbytes)
        end = max((self._first[name] + info.nbytes for name, info in self.tensors.items()), default=0)
        size = os.fstat(self._file.fileno()).st_size
        if size < end:
            raise CheckpointError(f"{self.path} is cut off", f"{end} bytes are expected, it has {size}")

    def layout(self, name: str) -> StorageLayout:
        """``toy_q8`` for matrices, ``f32`` for vectors. Raises CheckpointError for another name."""
        if name not in _LAYOUTS:
            raise CheckpointError(f"{self.path} uses the layout {name!r}", f"toyq8 files have {', '.join(_LAYOUTS)}")
        return _LAYOUTS[name]

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """See contracts.checkpoint.Checkpoint.read."""
        info, first = self.tensors[name], self._first[name]
        if rows is None:
            return self._bytes(first, info.nbytes)
        width = info.nbytes // info.shape[0]
        return memoryview(b"".join(self._bytes(first + low * width, (high - low) * width) for low, high in rows))

    def tokenizer(self) -> TokenizerSource:
        """What the header holds."""
        return TokenizerSource(**self._tokenizer)

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()

    def _bytes(self, start: int, count: int) -> memoryview:
        data = os.pread(self._file.fileno(), count, start)
        if len(data) != count:
            raise CheckpointError(
                f"{self.path} is cut off", f"{count} bytes are expected at {start}, it has {len(data)}"
            )
        return memoryview(data)


def write(
    file: BinaryIO, config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: TokenizerSource,
    weights: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    """Write a checkpoint: float32 matrices as toy_q8, vectors as they are."""
    tensors: dict[str, tuple[str, Sequence[int], int]] = {}
    data = bytearray()
    for name, values in weights.items():
        layout = TOY_Q8.name if values.ndim > 1 else DType.F32.value
        tensors[name] = (layout, values.shape, len(data))
        data += ToyFormat().encode(layout, values) if values.ndim > 1 else np.asarray(values, "<f4").tobytes()
    text = {name: getattr(tokenizer, name) for name in tokenizer.__struct_fields__}
    content = {"config": config, "generation_config": generation_config, "tokenizer": text, "tensors": tensors}
    header = json.dumps(content, default=dict).encode()
    file.write(MAGIC + len(header).to_bytes(8, "little") + header + data)

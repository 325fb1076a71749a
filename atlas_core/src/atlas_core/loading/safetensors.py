"""The safetensors header, read and checked before any tensor is: eight bytes of length, JSON, then the data."""

import json
import struct
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from atlas_core.loading.files import AGAIN, RangeFile, impostor
from atlas_core.vocab.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes; the limit of the reference implementation."""

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Every scalar type of the format with its size in bits."""


class Stored(Struct, frozen=True):
    """One tensor: ``start`` and ``end`` are absolute positions in the file, ``shape`` is outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: RangeFile) -> dict[str, Stored]:
    """Every tensor of the file by name.

    The tensors cover the data exactly, without holes or overlaps, and every size follows from shape and dtype. Raises
    CheckpointError naming the file, its size, what was expected, and the tensor.
    """
    length = _header_length(file)
    entries = _parse(file.path, bytes(file.read([(8, 8 + length)])))
    entries.pop("__metadata__", None)
    stored = [_tensor(file.path, name, entry, 8 + length) for name, entry in entries.items()]
    _check_cover(file, stored, 8 + length)
    return {tensor.name: tensor for tensor in stored}


def _header_length(file: RangeFile) -> int:
    head = bytes(file.read([(0, min(file.size, 512))]))
    guess = impostor(head)
    if file.size < 8:
        _refuse(file.path, f"the header is too small: {file.size} bytes where at least 8 are needed", guess)
    length = int(struct.unpack_from("<Q", head)[0])
    if length > MAX_HEADER:
        _refuse(file.path, f"the header is too large: it claims {length} bytes of at most {MAX_HEADER}", guess)
    if 8 + length > file.size:
        _refuse(
            file.path,
            f"the header length is invalid: {8 + length} bytes are expected, the file has {file.size}",
            guess or "the file is cut",
        )
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                # The reference lets the last one win; which of two was meant nobody can know.
                _refuse(path, f"the header has the key {key!r} twice")
            found[key] = value
        return found

    if not text.startswith(b"{"):
        _refuse(path, "invalid JSON in the header: it does not begin with '{'")
    try:
        entries: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"invalid JSON in the header: {error}")
    metadata = entries.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "invalid JSON in the header: __metadata__ is not an object of strings")
    return entries


def _tensor(path: Path, name: str, entry: Any, base: int) -> Stored:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"invalid JSON in the header: {name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _refuse(path, f"the dtype {dtype!r} of {name!r} is an unknown variant")
    if not _naturals(shape):
        _refuse(path, f"invalid JSON in the header: the shape of {name!r} is not a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        _refuse(path, f"invalid JSON in the header: the data_offsets of {name!r} are not two positions")
    bits = BITS[dtype]
    for extent in shape:
        bits *= extent
        if bits >= 1 << 64:
            _refuse(path, f"overflow: the size of {name!r} {shape} does not fit into 64 bits")
    start, end = offsets
    if end < start:
        _refuse(path, f"invalid offset: {name!r} ends at {end} before it starts at {start}")
    if bits % 8 or end - start != bits // 8:
        _refuse(
            path,
            f"invalid shape, dtype or offset: {name!r} has {end - start} bytes, and {dtype} {shape} needs {bits / 8:g}",
        )
    return Stored(name, dtype, tuple(shape), base + start, base + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(file: RangeFile, stored: list[Stored], base: int) -> None:
    position, before = base, "the header"
    for tensor in sorted(stored, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != position:
            _refuse(
                file.path,
                f"invalid offset: {tensor.name!r} starts at {tensor.start - base} of the data, "
                f"and {before} ends at {position - base}",
            )
        position, before = tensor.end, repr(tensor.name)
    if position != file.size:
        _refuse(
            file.path,
            f"the file is not fully covered: {position} bytes are expected, it has {file.size}",
            "the file is cut" if file.size < position else "bytes follow the last tensor",
        )


def _refuse(path: Path, why: str, guess: str = "") -> NoReturn:
    raise CheckpointError(f"{path} is not a valid safetensors file", f"{why}; {guess}" if guess else why, AGAIN)

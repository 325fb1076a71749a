"""The header of a GGUF file (versions 2 and 3), read with every length checked against what the file still has.

Layout, little-endian: magic, u32 version, u64 tensors, u64 keys; per key: string, u32 type, value; per tensor: string,
u32 dimensions, u64 extents (innermost first), u32 type, u64 offset; padding to the alignment; the tensors.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout
from atlas_quant_gguf.ggml import TYPES
from atlas_quant_gguf.texts import PREFIX, Texts, short_lengths

MAGIC = b"GGUF"
AGAIN = "download it again"

_MAX_STRING = 16 << 20  # bytes; the longest real ones are chat templates of some 20 kB
_MAX_ITEMS = 1 << 22  # of an array; the largest vocabularies have some 300,000 tokens
_MAX_HEADER = 512 << 20  # bytes
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DEPTH = 4
_BLOCK = 256 << 10  # bytes
_FEW = 1024
"""So many strings of an array are decoded at once; of more each when it is asked for."""
_USUAL = 64
"""Bytes that hold a string, mostly: no more is looked at than so many strings may take."""
_MOST_SINGLE = 1024
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}


class GgufTensor(Struct, frozen=True):
    """One tensor: ``shape`` outermost first, ``start`` its absolute position in the file."""

    name: str
    shape: tuple[int, ...]
    layout: StorageLayout
    start: int
    nbytes: int


class GgufHeader(Struct, frozen=True):
    """``metadata`` has numbers, booleans, strings and lists of them, long ones of strings as ``Texts``, not checked."""

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(file: BinaryIO, size: int, path: Path) -> GgufHeader:
    """Read from the start of ``file``, which has ``size`` bytes. Raises CheckpointError naming ``path`` and the position."""
    cursor = _Cursor(file, size, path)
    magic = cursor.take(min(4, size))
    if magic != MAGIC:
        looks = "a git-lfs pointer" if magic == b"vers" else "not GGUF"
        cursor.refuse(f"it begins with {magic!r} ({looks}), not with {MAGIC!r}")
    version = cursor.u32()
    if version & 0xFFFF == 0:
        cursor.refuse("it is big-endian", "use a little-endian file")
    if version not in (2, 3):
        cursor.refuse(f"it is of version {version}; 2 and 3 can be read", "convert it with a current llama.cpp")
    tensor_count = cursor.count(_MAX_TENSORS, 32, "tensors")
    key_count = cursor.count(_MAX_KEYS, 13, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string("a key")
        if key in metadata:
            cursor.refuse(f"the key {key!r} is there twice")
        metadata[key] = _value(cursor, cursor.u32(), key)
    if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
        cursor.refuse(f"it is one of {parts} parts", "join them: llama-gguf-split --merge FIRST OUT")
    return GgufHeader(version, metadata, _tensors(cursor, tensor_count, metadata.get("general.alignment", 32)))


class _Cursor:
    """Reads that never ask for more than the file still has."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file = file
        self._path = path
        self.size = size
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            self.refuse(f"{count} bytes are expected, {self.size - self.position} are left")
        if self.position + count > _MAX_HEADER:
            self.refuse(f"the header is longer than {_MAX_HEADER} bytes")
        try:
            data = self._file.read(count)
        except OSError as error:
            self.refuse(error.strerror or str(error), "check the disk")
        if len(data) != count:
            self.refuse(f"it ended at {self.position + len(data)} while it was read")
        self.position += count
        return data

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def count(self, most: int, item_bytes: int, what: str) -> int:
        """A u64 count of things of at least ``item_bytes`` each."""
        count = self.u64()
        if count > most or count * item_bytes > self.size - self.position:
            self.refuse(f"it claims {count} {what}, more than there can be")
        return count

    def string(self, what: str) -> str:
        length = self.count(_MAX_STRING, 1, f"bytes in {what}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8: {error.reason}")

    def strings(self, count: int, what: str) -> Sequence[str]:
        """As many strings one behind the other. Most are found by looking at a block at once."""
        begin = self.position
        lengths: list[npt.NDArray[np.int32]] = []
        found, single = 0, 1
        while found < count:
            several = self._short(count - found)
            # Where that fails, more and more are read one by one before it is tried again.
            single = 1 if len(several) else min(2 * single, _MOST_SINGLE)
            found += len(several)
            others = [self._length(what) for _ in range(min(single, count - found))]
            found += len(others)
            lengths += [several, np.array(others, np.int32)]
        end, self.position = self.position, begin
        self._seek()
        sizes = np.concatenate([np.zeros(0, np.int32), *lengths])
        texts = Texts(self.take(end - begin), sizes, begin)
        if count > _FEW:
            return texts  # checked by who takes them for a vocabulary, while weights are read
        try:
            texts.check()
        except UnicodeDecodeError as error:
            self.position = begin + error.start
            self.refuse(f"{what} is not UTF-8: {error.reason}")
        return list(texts)

    def _short(self, most: int) -> npt.NDArray[np.int32]:
        """The lengths of short strings from here on, which are skipped; none where the next is not one of them."""
        try:
            data = self._file.read(min(_BLOCK, most * _USUAL, self.size - self.position, _MAX_HEADER - self.position))
        except OSError:
            data = b""  # told where the string is read by itself
        lengths = short_lengths(data)[:most]
        self.position += int(lengths.sum()) + PREFIX * len(lengths)
        self._seek()
        return lengths

    def _length(self, what: str) -> int:
        """The length of the next string, which is skipped."""
        length = self.count(_MAX_STRING, 1, f"bytes in {what}")
        self.take(length)
        return length

    def _seek(self) -> None:
        try:
            self._file.seek(self.position)
        except OSError as error:
            self.refuse(error.strerror or str(error), "check the disk")

    def refuse(self, why: str, cure: str = AGAIN) -> NoReturn:
        raise CheckpointError(
            f"{self._path} is not a GGUF file that can be read", f"at byte {self.position} of {self.size}: {why}", cure
        )


def _value(cursor: _Cursor, kind: int, key: str, depth: int = 0) -> Any:
    if kind == _STRING:
        return cursor.string(f"the value of {key!r}")
    if kind == _ARRAY:
        return _array(cursor, key, depth)
    return _numbers(cursor, kind, 1, key)[0]


def _array(cursor: _Cursor, key: str, depth: int) -> Sequence[Any]:
    kind = cursor.u32()
    if kind in _NUMBERS or kind == _BOOL:
        width = 1 if kind == _BOOL else np.dtype(_NUMBERS[kind]).itemsize
        return _numbers(cursor, kind, cursor.count(_MAX_ITEMS, width, f"items in {key!r}"), key)
    if kind not in (_STRING, _ARRAY):
        cursor.refuse(f"the items of {key!r} are of the unknown type {kind}")
    if depth == _MAX_DEPTH:
        cursor.refuse(f"the arrays of {key!r} are nested more than {_MAX_DEPTH} deep")
    count = cursor.count(_MAX_ITEMS, 8 if kind == _STRING else 12, f"items in {key!r}")
    if kind == _STRING:
        return cursor.strings(count, f"the value of {key!r}")
    return [_value(cursor, kind, key, depth + 1) for _ in range(count)]


def _numbers(cursor: _Cursor, kind: int, count: int, key: str) -> list[Any]:
    if kind == _BOOL:
        flags = cursor.take(count)
        if flags.translate(None, b"\x00\x01"):
            cursor.refuse(f"{key!r} has a boolean that is neither 0 nor 1")
        return [flag == 1 for flag in flags]
    if kind not in _NUMBERS:
        cursor.refuse(f"{key!r} is of the unknown type {kind}")
    dtype = np.dtype(_NUMBERS[kind])
    values: list[Any] = np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()
    return values


def _tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    if type(alignment) is not int or alignment <= 0 or alignment % 8 or alignment > 1 << 20:
        cursor.refuse(f"general.alignment is {alignment!r}, not a small multiple of 8")
    found: list[GgufTensor] = []
    for _ in range(count):
        name = cursor.string("the name of a tensor")
        found.append(_tensor(cursor, name, alignment))
    base = -(-cursor.position // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    end, before = base, "the header"
    for tensor in sorted(found, key=lambda tensor: tensor.start):
        start = base + tensor.start
        if tensor.name in placed:
            cursor.refuse(f"the tensor {tensor.name!r} is there twice")
        if start < end:
            cursor.refuse(f"{tensor.name!r} begins at {start}, inside {before}")
        end, before = start + tensor.nbytes, repr(tensor.name)
        placed[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.layout, start, tensor.nbytes)
    if end > cursor.size:
        cursor.refuse(f"the file is cut: {end} bytes are expected, it has {cursor.size}")
    return placed


def _tensor(cursor: _Cursor, name: str, alignment: int) -> GgufTensor:
    dimensions = cursor.u32()
    if not 1 <= dimensions <= 4:
        cursor.refuse(f"{name!r} has {dimensions} dimensions; 1 to 4 are possible")
    *extents, number, offset = struct.unpack(f"<{dimensions}QIQ", cursor.take(8 * dimensions + 12))
    shape = tuple(extents[::-1])
    if number not in TYPES:
        cursor.refuse(f"{name!r} is of the unknown tensor type {number}", "ask for a newer atlas-quant-gguf")
    layout = TYPES[number]
    if min(shape) == 0 or max(shape) >= 1 << 40:
        cursor.refuse(f"{name!r} has the impossible shape {list(shape)}")
    if offset % alignment:
        cursor.refuse(f"{name!r} lies at {offset}, which is not a multiple of {alignment}")
    try:
        nbytes = layout.nbytes(shape)
    except ValueError as error:
        cursor.refuse(f"{name!r}: {error}")
    return GgufTensor(name, shape, layout, offset, nbytes)

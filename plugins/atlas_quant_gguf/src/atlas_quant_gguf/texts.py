"""Strings that lie one behind the other in a file: found at once, decoded when somebody asks.

A vocabulary has hundreds of thousands, and a start looks at a handful.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

PREFIX = 8
"""Bytes of a length, little-endian."""


class Texts(Sequence[str]):
    """As many strings as ``sizes`` (int32) has entries, UTF-8, one behind the other in ``data``, each behind its length.

    ``data`` begins at byte ``place`` of its file. Whoever looks into a string that is no UTF-8 gets UnicodeDecodeError; ``check``
    looks into all at once.
    """

    def __init__(self, data: bytes, sizes: npt.NDArray[np.int32], place: int = 0) -> None:
        self.place = place
        self._data = data
        self._sizes = sizes

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self._sizes + PREFIX, dtype=np.int64)

    def check(self) -> None:
        """Raises UnicodeDecodeError when one is not UTF-8, with its position in ``data``."""
        starts = self._ends - self._sizes
        # With zeros for the lengths between them all are one text, since no character reaches across a zero.
        text = np.frombuffer(self._data, np.uint8).copy()
        text[starts - PREFIX] = 0
        longer = starts[self._sizes >= 256]
        for byte in range(1, PREFIX):
            text[longer - byte] = 0
        str(text.data, "utf-8")

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        end = self._ends[index]
        return self._data[end - self._sizes[index] : end].decode()

    def __iter__(self) -> Iterator[str]:
        data = self._data
        spans = zip(self._ends.tolist(), self._sizes.tolist(), strict=True)
        return (data[end - size : end].decode() for end, size in spans)


def short_lengths(data: bytes) -> npt.NDArray[np.int32]:
    """The lengths of the strings that ``data`` begins with, as far as they follow from looking at all of it at once.

    Wherever seven zeros stand there may be the length of a short string (fewer than 256 bytes), in the byte before; among them is a whole
    word of four. The true ones are those that lead from each to the next, beginning with the first; where that fails (a longer string, an
    empty one, zeros in a text) the rest is left.
    """
    found = np.frombuffer(data, np.uint8)
    at = np.flatnonzero(np.frombuffer(data, "<u4", len(data) // 4) == 0) * 4
    at = at[(at >= 4) & (at < len(data) - PREFIX)]
    before = found[at - 1] == 0
    begin = at - before
    for byte in (2, 3):
        before &= found[at - byte] == 0
        begin -= before
    at = begin - 1
    at = at[(found[begin + 4] | found[begin + 5] | found[begin + 6]) == 0]
    if not len(at) or at[0] != 0:
        return np.zeros(0, np.int32)
    lengths: npt.NDArray[np.int32] = found[at].astype(np.int32)
    follows = at[:-1] + PREFIX + lengths[:-1] == at[1:]
    count = len(follows) if follows.all() else int(follows.argmin())
    whole = at[count] + PREFIX + lengths[count] <= len(data)
    return lengths[: count + int(whole)]

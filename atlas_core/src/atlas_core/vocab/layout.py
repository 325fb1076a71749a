"""How the numbers of one weight lie in memory. Kernels key on layouts, never on the names of file formats."""

from msgspec import Struct

from atlas_core.vocab.dtype import DType


class StorageLayout(Struct, frozen=True):
    """Rows of ``block`` consecutive weights along the last dimension, ``block_bytes`` each, behind ``head_bytes`` for the whole row.

    ``name`` identifies the exact bit layout (``q4_1`` is the ggml block: f16 scale, f16 minimum, 16 bytes of nibbles).
    ``scalar`` is set for plain arrays only (block 1).
    """

    name: str
    block: int
    block_bytes: int
    scalar: DType | None = None
    head_bytes: int = 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of ``columns`` weights. Raises ValueError when the row is not a whole number of blocks."""
        if columns % self.block:
            raise ValueError(f"{columns} columns are not a multiple of the {self.block}-weight block of {self.name}")
        return self.head_bytes + columns // self.block * self.block_bytes

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a whole tensor of ``shape``; a scalar shape counts as one row of one."""
        rows = 1
        for extent in shape[:-1]:
            rows *= extent
        return rows * self.row_bytes(shape[-1] if shape else 1)


def plain(dtype: DType) -> StorageLayout:
    """The layout of a plain array of ``dtype``, named after it."""
    return StorageLayout(dtype.value, 1, dtype.itemsize, dtype)

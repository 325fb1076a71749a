"""Host memory that is handed out like device memory, with every access checked against what is allocated."""

import ctypes
from bisect import bisect_right

import numpy as np

from atlas_core.vocab.errors import BudgetError, DeviceError

ALIGNMENT = 256


class CheckedMemory:
    """An allocator of real host memory with a size of its own. Addresses are the host's; ranges are checked on every use."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._bases: list[int] = []
        self._blocks: dict[int, tuple[int, np.ndarray]] = {}

    def alloc(self, nbytes: int) -> int:
        """An aligned address. Raises BudgetError when the size set at construction would be exceeded."""
        if nbytes <= 0:
            raise DeviceError(f"{nbytes} bytes of device memory were asked for", "a block has at least one byte")
        if self.used + nbytes > self.total:
            raise BudgetError(
                f"{nbytes} bytes of device memory were asked for",
                f"{self.total - self.used} of {self.total} bytes are free",
                "lower the memory plan, or end what else uses the device",
            )
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        base = -(-raw.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._bases.insert(bisect_right(self._bases, base), base)
        self._blocks[base] = nbytes, raw
        self.used += nbytes
        return base

    def free(self, address: int) -> None:
        """Give a block back. Raises DeviceError when no block starts at ``address``."""
        if address not in self._blocks:
            raise DeviceError(f"{address:#x} is freed", "no block starts there, or it was freed before")
        nbytes, _ = self._blocks.pop(address)
        self._bases.remove(address)
        self.used -= nbytes

    def require(self, address: int, nbytes: int, what: str) -> None:
        """Raises DeviceError, naming ``what``, unless [address, address + nbytes) lies inside one block."""
        index = bisect_right(self._bases, address) - 1
        base = self._bases[index] if index >= 0 else None
        if base is None or nbytes < 0 or address + nbytes > base + self._blocks[base][0]:
            near = (
                f"the block below it is [{base:#x}, {base + self._blocks[base][0]:#x})"
                if base
                else "no block is below it"
            )
            raise DeviceError(f"{what} touches [{address:#x}, {address + nbytes:#x})", f"that is not allocated; {near}")

    def view(self, address: int, nbytes: int) -> memoryview:
        """The bytes at ``address``, writable. Raises DeviceError when they are not inside one block."""
        self.require(address, nbytes, "a view")
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def clear(self) -> None:
        """Free everything."""
        self._bases.clear()
        self._blocks.clear()
        self.used = 0

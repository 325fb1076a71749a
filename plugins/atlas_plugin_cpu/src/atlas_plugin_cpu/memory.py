"""Host memory that plays the part of device memory: page-aligned, and checked at its borders."""

import bisect
import contextlib
import ctypes
import mmap

from atlas_core.vocab.errors import BudgetError, DeviceError
from atlas_plugin_cpu.machine import memory

_HUGE = 2 * 1024 * 1024


class _Block:
    """One anonymous mapping. ``pin`` keeps the mapping's buffer exported, so that its address stays valid."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel built without huge pages refuses the advice; small pages hold the same bytes.
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.pin: ctypes.c_char | None = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self.pin)

    def release(self) -> None:
        self.pin = None
        self.map.close()


class Memory:
    """Every allocation of one backend."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._bases: list[int] = []

    def alloc(self, nbytes: int) -> int:
        """The address of ``nbytes`` new bytes. Raises BudgetError when the host has not that much to spare."""
        if nbytes < 0:
            raise DeviceError(f"{nbytes} bytes were asked for", "a size cannot be negative", "report this as a bug")
        free, _ = memory()
        if nbytes > free:
            raise BudgetError(
                f"{nbytes} bytes of host memory are not to be had",
                f"{free} bytes are available to this process",
                "lower --max-seq-len or --max-batch-size, or choose a smaller model",
            )
        try:
            block = _Block(nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"{nbytes} bytes of host memory are not to be had",
                f"{error}; {free} bytes are free",
                "free some memory",
            ) from error
        self._blocks[block.address] = block
        bisect.insort(self._bases, block.address)
        return block.address

    def free(self, address: int) -> None:
        """Give one allocation back. Raises DeviceError for an address that is none."""
        block = self._blocks.pop(address, None)
        if block is None:
            raise DeviceError(f"{address:#x} was freed", "no allocation begins there", "report this as a bug")
        self._bases.remove(address)
        block.release()

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Raise DeviceError unless [address, address + nbytes) lies inside one allocation."""
        index = bisect.bisect_right(self._bases, address) - 1
        block = self._blocks[self._bases[index]] if index >= 0 else None
        if nbytes < 0 or block is None or address + nbytes > block.address + block.nbytes:
            raise DeviceError(
                f"{what} of {nbytes} bytes at {address:#x}", "no allocation holds that range", "report this as a bug"
            )

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        for address in list(self._blocks):
            self.free(address)

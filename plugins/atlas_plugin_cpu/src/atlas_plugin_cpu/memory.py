"""Host memory that plays the part of device memory: page-aligned, and checked at its borders."""

import bisect
import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

from atlas_core.runtime.host import memory
from atlas_core.vocab.errors import BudgetError, DeviceError

_PAGE = 4096
_HUGE = 2 * 1024 * 1024
_SLAB = 32 * _HUGE
_MOST, _SHARE = 512 << 20, 8
"""Bytes that are got ready before anybody asks for them, at most, and the part of what is available."""


Populate = Callable[[int, int, int], Callable[[], None]]
"""(address, bytes, address of two int64: 1 ends it, bytes done) → what is to be called, on any thread."""


class _Slab:
    """One anonymous mapping in huge pages, from which blocks are cut.

    A weight by itself rarely fills a huge page; side by side they do, and reading them misses the TLB less.
    ``pin`` keeps the mapping's buffer exported, so that its address stays valid.
    """

    def __init__(self, nbytes: int) -> None:
        whole = -(-nbytes // _HUGE) * _HUGE
        self._map = mmap.mmap(-1, whole + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel built without huge pages refuses the advice; small pages hold the same bytes.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._pin: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = -(-ctypes.addressof(self._pin) // _HUGE) * _HUGE
        self.nbytes = whole
        self._end = self.address + whole
        self._free = whole
        self._used: list[tuple[int, int]] = []

    @property
    def empty(self) -> bool:
        return not self._used

    @property
    def used(self) -> int:
        """Bytes that belong to blocks."""
        return self.nbytes - self._free

    def take(self, nbytes: int) -> int | None:
        """The address of a block, at a page's beginning: behind all others, else in the first gap; None when it fits nowhere."""
        if nbytes > self._free:
            return None
        start = -(-self._used[-1][1] // _PAGE) * _PAGE if self._used else self.address
        if start + nbytes <= self._end:
            self._used.append((start, start + max(nbytes, 1)))
            self._free -= max(nbytes, 1)
            return start
        start = self.address
        for index, (first, last) in enumerate([*self._used, (self._end, self._end)]):
            if start + nbytes <= first:
                self._used.insert(index, (start, start + max(nbytes, 1)))
                self._free -= max(nbytes, 1)
                return start
            start = -(-last // _PAGE) * _PAGE
        return None

    def give(self, address: int) -> None:
        """Take one block back."""
        kept = [block for block in self._used if block[0] != address]
        self._free += sum(end - start for start, end in self._used) - sum(end - start for start, end in kept)
        self._used = kept

    def release(self) -> None:
        self._pin = None
        self._map.close()


class _Populating:
    """A thread that has the system find the pages of a slab, for which whoever writes there first would wait."""

    def __init__(self, slab: _Slab, populate: Populate) -> None:
        self._state = (ctypes.c_int64 * 2)(0, 0)
        work = populate(slab.address, slab.nbytes, ctypes.addressof(self._state))
        self._thread = threading.Thread(target=work, name="atlas-populate", daemon=True)
        self._thread.start()

    @property
    def done(self) -> int:
        return self._state[1]

    def end(self) -> None:
        self._state[0] = 1
        self._thread.join()


class Memory:
    """Every allocation of one backend. ``populate`` makes what gets fresh pages ready."""

    def __init__(self, populate: Populate) -> None:
        self._populate = populate
        self._populating: dict[_Slab, _Populating] = {}
        self._slabs: list[_Slab] = []
        self._blocks: dict[int, tuple[int, _Slab]] = {}
        self._bases: list[int] = []

    def expect(self, nbytes: int) -> None:
        """Get memory for most of ``nbytes`` ready, on a thread; none where the host has not plenty."""
        nbytes = min(nbytes, _MOST, memory()[0] // _SHARE)
        if nbytes < _HUGE:
            return
        with contextlib.suppress(OSError, ValueError, OverflowError):  # whoever needs it says that it is not to be had
            slab = _Slab(nbytes)
            self._slabs.append(slab)
            self._populating[slab] = _Populating(slab, self._populate)

    def alloc(self, nbytes: int) -> int:
        """The address of ``nbytes`` new bytes. Raises BudgetError when the host has not that much to spare."""
        if nbytes < 0:
            raise DeviceError(f"{nbytes} bytes were asked for", "a size cannot be negative", "report this as a bug")
        address, slab = self._place(nbytes)
        self._blocks[address] = nbytes, slab
        bisect.insort(self._bases, address)
        return address

    def _place(self, nbytes: int) -> tuple[int, _Slab]:
        for slab in self._slabs:
            address = slab.take(nbytes)
            if address is not None:
                return address, slab
        free, _ = memory()
        if nbytes > free:
            raise BudgetError(
                f"{nbytes} bytes of host memory are not to be had",
                f"{free} bytes are available to this process",
                "lower --max-seq-len or --max-batch-size, or choose a smaller model",
            )
        try:
            slab = _Slab(max(nbytes, _SLAB))
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"{nbytes} bytes of host memory are not to be had",
                f"{error}; {free} bytes are free",
                "free some memory",
            ) from error
        self._slabs.append(slab)
        address = slab.take(nbytes)
        assert address is not None
        return address, slab

    def free(self, address: int) -> None:
        """Give one allocation back. Raises DeviceError for an address that is none."""
        block = self._blocks.pop(address, None)
        if block is None:
            raise DeviceError(f"{address:#x} was freed", "no allocation begins there", "report this as a bug")
        self._bases.remove(address)
        _, slab = block
        slab.give(address)
        if slab.empty:
            self._release(slab)

    @property
    def ready(self) -> int:
        """Bytes that were got ready and are not allocated."""
        return sum(max(0, populating.done - slab.used) for slab, populating in self._populating.items())

    def _release(self, slab: _Slab) -> None:
        populating = self._populating.pop(slab, None)
        if populating is not None:
            populating.end()
        self._slabs.remove(slab)
        slab.release()

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Raise DeviceError unless [address, address + nbytes) lies inside one allocation."""
        index = bisect.bisect_right(self._bases, address) - 1
        base = self._bases[index] if index >= 0 else 0
        if index < 0 or nbytes < 0 or address + nbytes > base + self._blocks[base][0]:
            raise DeviceError(
                f"{what} of {nbytes} bytes at {address:#x}", "no allocation holds that range", "report this as a bug"
            )

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        for address in list(self._blocks):
            self.free(address)
        for slab in list(self._slabs):
            self._release(slab)

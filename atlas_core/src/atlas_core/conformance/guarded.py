"""Device buffers between sentinels: what is written outside of a buffer is found out."""

from typing import Any

import numpy as np

from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.ops import Buffer
from atlas_core.runtime.loader import as_bytes

GUARD = 256
_SENTINEL = 0x5C


class GuardedMemory:
    """Named buffers, each with GUARD sentinel bytes before its first and at least as many after its last byte."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._blocks: dict[str, tuple[int, int]] = {}

    def place(self, name: str, nbytes: int) -> Buffer:
        """A new buffer, 256-byte aligned, contents undefined."""
        total = GUARD + -(-max(nbytes, 1) // GUARD) * GUARD + GUARD
        base = self._backend.alloc(total)
        self._blocks[name] = base, nbytes
        self._backend.copy_h2d(bytes([_SENTINEL]) * total, base)
        return Buffer(base + GUARD, nbytes)

    def write(self, name: str, data: bytes | memoryview | np.ndarray[Any, Any]) -> None:
        """Fill a buffer. Raises ValueError unless ``data`` is exactly as long."""
        base, nbytes = self._blocks[name]
        flat = as_bytes(data)
        if memoryview(flat).nbytes != nbytes:
            raise ValueError(f"{name} has {nbytes} bytes and is written with {memoryview(flat).nbytes}")
        if nbytes:
            self._backend.copy_h2d(flat, base + GUARD)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of a buffer, uint8."""
        base, nbytes = self._blocks[name]
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self._backend.copy_d2h(base + GUARD, data.data)
        return data

    def damage(self) -> list[str]:
        """One sentence for each buffer whose sentinels have changed, with the distance of the farthest changed byte."""
        found = []
        for name, (base, nbytes) in self._blocks.items():
            after = -(-max(nbytes, 1) // GUARD) * GUARD - nbytes + GUARD
            head, tail = np.empty(GUARD, np.uint8), np.empty(after, np.uint8)
            self._backend.copy_d2h(base, head.data)
            self._backend.copy_d2h(base + GUARD + nbytes, tail.data)
            if (bad := np.flatnonzero(head != _SENTINEL)).size:
                found.append(f"{name} was written to from {GUARD - int(bad[0])} bytes before its start on")
            if (bad := np.flatnonzero(tail != _SENTINEL)).size:
                found.append(f"{name} was written to up to {int(bad[-1]) + 1} bytes after its end")
        return found

    def free(self) -> None:
        """Give everything back."""
        for base, _ in self._blocks.values():
            self._backend.free(base)
        self._blocks.clear()

"""Weights from the page cache to where they are used: reads and launches in one foreign call for each thread that takes part."""

import ctypes
from collections.abc import Sequence

import numpy as np

from atlas_core.contracts.backend import HostLoad, HostRooms
from atlas_core.vocab.errors import KernelError
from atlas_plugin_cpu.executor import TRAMPOLINE, Command, Kernel

_MOST_SLOTS = 16  # as executor.cpp has them


class Loads:
    """A list of loads as ``loads_run`` reads it; see contracts.backend.HostLoads.

    ``commands`` are the launches of each load.
    """

    def __init__(
        self, entry: Kernel, loads: Sequence[HostLoad], commands: Sequence[Sequence[Command]], rooms: HostRooms
    ) -> None:
        words: list[int] = []
        offsets = []
        for load, launches in zip(loads, commands, strict=True):
            offsets.append(len(words))
            words += load.descriptor, load.start, load.nbytes, load.address, len(launches)
            for command in launches:
                if len(command.args) > _MOST_SLOTS:
                    raise KernelError(
                        f"{command.kernel} takes {len(command.args)} arguments", "loads have room for fewer"
                    )
                words += command.words
        self._words, self._offsets = np.array(words, np.uint64), np.array(offsets, np.int64)
        self._states, self._next = np.zeros(len(offsets), np.uint8), np.zeros(1, np.int64)
        pointers = (array.ctypes.data for array in (self._words, self._offsets, self._states, self._next))
        self._slots = *pointers, len(offsets), rooms.address, rooms.nbytes
        self._call = TRAMPOLINE(entry.address)

    def run(self, room: int, most: int) -> bool:
        """Bring, in order, up to ``most`` that no other thread has taken; whether there may be more."""
        slots = *self._slots, room, most
        self._call((ctypes.c_uint64 * len(slots))(*slots), 0, 1)
        return bool(self._next[0] < len(self._offsets))

    def stop(self) -> None:
        """Take no more."""
        self._next[0] = len(self._offsets)

    def states(self) -> bytes:
        """One LoadState for each load."""
        return self._states.tobytes()

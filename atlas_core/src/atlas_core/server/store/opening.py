"""Which store there is."""

import time
from collections.abc import Callable
from pathlib import Path

from atlas_core.server.store.database import Database
from atlas_core.server.store.memory import MemoryStore
from atlas_core.server.store.nothing import NoStore
from atlas_core.server.store.port import Store, StoreLimits
from atlas_core.server.store.sqlite import SqliteStore

MEMORY = "memory"
NOTHING = "none"


def open_store(place: str, limits: StoreLimits, clock: Callable[[], float] = time.time) -> Store:
    """The store in the file ``place``, in memory, or none that keeps anything. Raises UsageError for a file that cannot be used."""
    if place == NOTHING:
        return NoStore()
    if place == MEMORY:
        return MemoryStore(limits, clock)
    return SqliteStore(Database(Path(place).expanduser(), limits, clock))

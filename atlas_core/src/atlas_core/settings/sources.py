"""Where a value came from."""

from enum import IntEnum

from msgspec import Struct


class Level(IntEnum):
    """Who may overrule whom: a greater level wins."""

    BUILT_IN = 0
    HARDWARE = 1
    MODEL = 2
    FILE = 3
    ENVIRONMENT = 4
    FLAG = 5


class Source(Struct, frozen=True):
    """``origin`` is what a person would look for: ``--port``, ``ATLAS_PORT``, ``atlas.toml: port``, ``built-in``."""

    level: Level
    origin: str

    def __str__(self) -> str:
        return self.origin


BUILT_IN = Source(Level.BUILT_IN, "built-in")

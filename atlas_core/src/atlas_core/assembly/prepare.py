"""The beginning of an engine's process: the disk begins to read, and only then is imported what building an engine takes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from atlas_core.assembly.early import guess
from atlas_core.assembly.settings import decode_settings

if TYPE_CHECKING:
    from atlas_core.engine.loop import Engine
    from atlas_core.engine.serving import Report


def prepare(early: bytes | None) -> "Callable[[bytes, Report], Engine]":
    """What builds an engine, with what it needs of plugins already at hand. Raises PluginError.

    ``early`` are the settings that it will most likely be called with.
    """
    likely = None if early is None else decode_settings(early)
    ahead = None if likely is None else guess(likely)
    from atlas_core.assembly.engine import builder

    build = builder(likely)

    def built(settings: bytes, report: "Report") -> "Engine":
        nonlocal ahead
        if ahead is not None and settings != early:
            ahead.close()
            ahead = None
        guessed, ahead = ahead, None
        return build(settings, report, guessed)

    return built

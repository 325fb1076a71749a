"""What the operator is told once: that something in requests has no effect."""

import logging

_LOG = logging.getLogger("atlas.server")
_MOST = 256


class Told:
    """Remembers what was told; clients choose the words, so that there are at most 256 of them."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def once(self, what: str) -> None:
        """Log that ``what`` has no effect, the first time."""
        if what not in self._told and len(self._told) < _MOST:
            self._told.add(what)
            _LOG.warning(
                "requests have %s, which nothing here knows; they are left out",
                "".join(c if c.isprintable() else "?" for c in what),
            )

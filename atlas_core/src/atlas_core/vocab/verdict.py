"""The answer that every candidate gives to the resolver: yes or no, and why."""

from msgspec import Struct


class Verdict(Struct, frozen=True):
    """``ok`` with a ``rank`` (higher wins; equal best ranks are an error), or not ok; ``reasons`` explain either."""

    ok: bool
    reasons: tuple[str, ...] = ()
    rank: int = 0

    @classmethod
    def yes(cls, rank: int = 0, *reasons: str) -> "Verdict":
        """Accept with ``rank``."""
        return cls(True, reasons, rank)

    @classmethod
    def no(cls, *reasons: str) -> "Verdict":
        """Refuse; at least one reason is demanded, so that no refusal is silent."""
        if not reasons:
            raise ValueError("a refusal needs a reason")
        return cls(False, reasons)

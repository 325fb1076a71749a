"""What one request brought, and reading it off a stream of events. Pure: the clock is handed in."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from atlas_core.vocab.errors import EngineError


class Sample(Struct, frozen=True):
    """Times are seconds on one monotonic clock. ``due`` is when the request should have been sent, ``sent`` when it was.

    ``arrivals`` are the times at which pieces of text came, the first being the first token's. The token counts are the server's
    own; ``counted`` is False where it gave none and each piece was taken for a token. ``error`` is empty for an answer.
    """

    due: float
    sent: float
    ended: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = True
    error: str = ""


def read_sample(events: Iterable[Mapping[str, Any]], due: float, sent: float, clock: Callable[[], float]) -> Sample:
    """Follow a streamed answer to its end. Raises what ``events`` raises, and EngineError for an answer without any text."""
    arrivals: list[float] = []
    usage: Mapping[str, Any] | None = None
    for event in events:
        if any(_text(choice) for choice in event.get("choices") or ()):
            arrivals.append(clock())
        usage = event.get("usage") or usage
    if not arrivals:
        raise EngineError("the answer has no text", "nothing can be measured by it", "ask for more tokens")
    counts = usage or {}
    prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
    counted = isinstance(prompt, int) and isinstance(completion, int)
    return Sample(
        due, sent, clock(), tuple(arrivals), prompt if isinstance(prompt, int) else 0,
        completion if isinstance(completion, int) else len(arrivals), counted,
    )  # fmt: skip


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a piece; what a model thinks before its answer counts, it is what a person waits through."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""

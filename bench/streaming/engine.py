"""An engine whose device does nothing but take its time; every token says when it was made."""

import json
import time
from collections.abc import Collection, Sequence
from typing import Any

from atlas_core.engine.loop import Engine, StepOutput
from atlas_core.ops.step import SlotLayout
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.plan import StepPlan
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.text.detokenize import Detokenizer
from atlas_core.vocab.messages import Ready

STAMP = 16
"""Characters of a token: monotonic nanoseconds, in hexadecimal digits."""
CONTEXT, PAGE, VOCAB = 4096, 16, 8


class Stamps:
    """A tokenizer whose tokens are the time at which their text is asked for."""

    special_ids: frozenset[int] = frozenset()
    special_tokens: frozenset[str] = frozenset()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """A token for every word."""
        return [1] * max(1, len(text.split()))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Nothing that anybody reads."""
        return "x" * len(ids)

    def token_bytes(self, token: int) -> bytes:
        """The time."""
        return f"{time.monotonic_ns():0{STAMP}x}".encode()

    def detokenizer(self, *, skip_special: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """Of one sequence."""
        return Detokenizer(self.token_bytes)


class Paced:
    """A StepRunner whose steps end when a device that makes ``rate`` tokens a second would have ended them."""

    asynchronous = False

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due = 0.0

    def launch(self, plan: StepPlan) -> int:
        """Tokens of the step."""
        return len(plan.sample_row)

    def kind(self, ticket: int) -> None:
        """Nothing is launched ahead."""

    def wait(self, ticket: int) -> None:
        """``collect`` does."""

    def collect(self, ticket: int) -> StepOutput:
        """Wait for the step's end."""
        now = time.monotonic()
        self._due = max(now, self._due + ticket / self._rate)
        time.sleep(self._due - now)
        return StepOutput([2] * ticket)

    def sample(self, ticket: int) -> None:
        """No grammar is ever waited for."""

    def close(self) -> None:
        """Nothing is held."""


def engine(streams: int, rate: float) -> Engine:
    """An engine of ``streams`` slots that makes ``rate`` tokens a second in all of them together."""
    pages = CONTEXT // PAGE
    limits = Limits(SlotLayout(streams, (pages,), 0), PAGE, (streams * pages,), VOCAB, CONTEXT, 1 << 16, 0, streams)
    return Engine(
        runner=Paced(rate), scheduler=Scheduler(limits), text=Stamps(), eos=(), info=Ready(CONTEXT, streams, VOCAB, "paced"),
    )  # fmt: skip


def build(settings: bytes, report: Any) -> Engine:
    """An engine.serving.Build; ``settings`` is JSON with ``streams`` and ``rate``."""
    return engine(**json.loads(settings))

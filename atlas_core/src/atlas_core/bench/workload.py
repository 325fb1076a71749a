"""What is asked, and when: the same for the same seed, whatever the server. Pure."""

from collections.abc import Iterator
from random import Random
from typing import Any, Literal

from msgspec import Struct

from atlas_core.vocab.errors import UsageError

Endpoint = Literal["completions", "chat"]

# Common words, which most vocabularies have as one token each together with the blank before them.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family",
    "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program",
    "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head",
    "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
)  # fmt: skip


class Workload(Struct, frozen=True):
    """``requests`` prompts of about ``prompt_tokens`` tokens, each answered with at most ``max_tokens``.

    ``rate`` is in requests a second, arriving at random and independently (a Poisson process); None sends each as soon as one of
    ``concurrency`` places is free. ``concurrency`` also limits what ``rate`` may have under way.
    """

    model: str
    endpoint: Endpoint = "completions"
    requests: int = 100
    concurrency: int = 8
    rate: float | None = None
    prompt_tokens: int = 128
    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for sizes that are not positive."""
        for name in ("requests", "concurrency", "prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "a measurement needs at least 1", f"raise {name}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise UsageError(f"the rate is {self.rate} requests a second", "it must be more than 0", "correct --rate")

    @property
    def path(self) -> str:
        """Where the requests go, behind ``/v1``."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def arrivals(self) -> list[float]:
        """When each request is due, in seconds from the start, ascending; all at once without a rate."""
        if self.rate is None:
            return [0.0] * self.requests
        draw, now, found = Random(self.seed), 0.0, []  # noqa: S311 - a load, not a secret
        for _ in range(self.requests):
            found.append(now)
            now += draw.expovariate(self.rate)
        return found

    def bodies(self) -> Iterator[dict[str, Any]]:
        """The request bodies, in order. Every prompt differs from its first word on, so that no prefix cache helps."""
        draw = Random(f"{self.seed} prompts")  # noqa: S311 - a load, not a secret
        for index in range(self.requests):
            words = [str(index), *draw.choices(_WORDS, k=self.prompt_tokens - 1)]
            text = " ".join(words)
            prompt: dict[str, Any] = {"prompt": text}
            if self.endpoint == "chat":
                prompt = {"messages": [{"role": "user", "content": text}]}
            body = {
                "model": self.model, **prompt, "max_tokens": self.max_tokens, "temperature": 0, "seed": self.seed,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            yield body | ({"ignore_eos": True} if self.ignore_eos else {})

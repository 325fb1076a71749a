"""What the server needs from its neighbours, as Protocols: an engine, the model's text, and somebody to tell the operator."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from atlas_core.contracts.checkpoint import Pooling
from atlas_core.text.dialect.choice import Speech
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.messages import Delta, Gauges, Generate, Progress, Ready

Sink = Callable[[Delta], bool]
"""Takes a delta at once, on the event loop's thread, and gives True; or gives False and has done nothing with it."""


class Engine(Protocol):
    """The engine, already started. ``state`` is ready, faulted, draining or gone."""

    @property
    def state(self) -> str:
        """One of the above, now."""
        ...

    @property
    def fault(self) -> AtlasError | None:
        """Why it is faulted; None while it is not."""
        ...

    @property
    def info(self) -> Ready:
        """What the engine said of itself when it was ready."""
        ...

    @property
    def gauges(self) -> Gauges:
        """The load after the last step."""
        ...

    def generate(self, request: Generate, /, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        """Deltas of one sequence; the last has ``finish``. Raises AtlasError when it fails.

        ``sink`` may be offered any but the last while who reads the generator waits for the next: what it takes is not yielded. What it
        raises, the generator raises.
        Closing the generator, or cancelling who waits for it, aborts the request.
        """
        ...

    async def drain(self, deadline: float, /) -> None:
        """Refuse new requests; return once the running ones are done, or after ``deadline`` seconds."""
        ...

    async def close(self) -> None:
        """End at once; what still runs fails. Safe to call twice."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back; thread-safe. ``special_ids`` are control tokens, which answers do not show unless asked to.

    ``special_tokens`` are their spellings.
    """

    @property
    def special_ids(self) -> frozenset[int]:
        """See above."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """See above."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of ``text``; ``add_special`` adds what belongs round every text, ``parse_special`` reads control tokens."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``. Raises RequestError for an id outside the vocabulary."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, which may be part of a character. Raises RequestError for an id outside the vocabulary."""
        ...


class ChatTemplate(Protocol):
    """Messages to the text of a prompt; thread-safe."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False, extra: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The prompt; ``extra`` are further variables of the template. Raises RequestError when the template refuses."""
        ...


class ServedModel(Struct, frozen=True):
    """The model as clients see it.

    ``names`` are what clients may call it, the first being its own. ``template`` is None for a model without one.
    ``sampling`` has server-wide defaults by field of SamplingParams (see ``translate.sampling_defaults``). ``created``
    is Unix time, seconds. ``tool_template`` is used instead where there are tools, if the model has one of its own for that.
    ``speech`` is how it writes calls and thoughts; with ``thinking`` false it is asked to have none, and they have
    ``thinking_budget`` tokens at most. ``pooling`` is how it makes vectors, of a model that embeds texts.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created: int
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    tool_template: ChatTemplate | None = None
    speech: Speech = field(default_factory=Speech)
    thinking: bool = True
    thinking_budget: int | None = None
    pooling: Pooling | None = None


class Embedder(Protocol):
    """Prompts to vectors, for models that give such.

    ``size`` is how many numbers a vector has, ``normalised`` whether its length is 1, ``prompt`` what stands before every text.
    """

    @property
    def size(self) -> int:
        """See above."""
        ...

    @property
    def normalised(self) -> bool:
        """See above."""
        ...

    @property
    def prompt(self) -> str:
        """See above."""
        ...

    async def embed(self, ids: tuple[int, ...], /) -> Sequence[float]:
        """The vector of one prompt, ``size`` numbers, pooled and not normalised yet. Raises AtlasError when it fails.

        Cancelling who waits for it gives the prompt up. Several may be asked for at once.
        """
        ...


class Service(Struct, frozen=True):
    """What bringing up results in: a started engine and the model that it serves; ``embedder`` only where that gives embeddings."""

    engine: Engine
    model: ServedModel
    embedder: Embedder | None = None


OnProgress = Callable[[Progress], None]
"""May be called on any thread."""

BringUp = Callable[[OnProgress], Awaitable[Service]]
"""Loads everything; cancelled when the server is told to end meanwhile, and must clean up then. Raises AtlasError.

It runs on the event loop, which answers /health meanwhile: what blocks belongs into ``background.in_background``.
"""


class Reporter(Protocol):
    """Tells the operator how the start goes; called on the event loop's thread."""

    def progress(self, progress: Progress) -> None:
        """A phase went on."""
        ...

    def ready(self, url: str, info: Ready) -> None:
        """Requests are served from now on."""
        ...

    def notice(self, text: str) -> None:
        """Anything else that a person should know: draining, a fault."""
        ...

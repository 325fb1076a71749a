"""What crosses between the API process and the engine: frozen values, encoded by ``engine.wire`` only."""

from typing import Literal, NamedTuple

from msgspec import Struct, field

from atlas_core.vocab.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Thinking(Struct, frozen=True):
    """The answer may begin with a thought, which ends with ``end``; stop strings do not count inside it.

    ``opened``: the prompt has begun it already; else it begins with ``start``, or there is none. With a ``budget`` the thought is
    ended after so many tokens by forcing ``end_ids``, the tokens of ``end``.
    """

    start: str
    end: str
    opened: bool
    budget: int | None = None
    end_ids: tuple[int, ...] = ()


class Generate(Struct, frozen=True):
    """Ask for one sequence. ``id`` is unique among live requests; ``arrival`` is the caller's monotonic time, seconds.

    ``embed``: what is wanted is the prompt's vector, and no token. ``grammar``, unless empty, is what the whole output must follow (see
    text.grammar), a thought at its beginning included. What was computed for others is used within one name ``space`` only.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: float = 0.0
    grammar: str = ""
    thinking: Thinking | None = None
    space: str = ""
    embed: bool = False


class Abort(Struct, frozen=True):
    """Stop a request; unknown ids are ignored, since the answer may already be under way."""

    id: str


class Drain(Struct, frozen=True):
    """Refuse new requests, finish the running ones, abort what is left after ``deadline`` seconds, then end."""

    deadline: float


class TokenLogprob(Struct, frozen=True):
    """One token with its log-probability; ``bytes`` are the token's own, which may be part of a character."""

    id: int
    token: str
    logprob: float
    bytes: bytes


class Position(Struct, frozen=True):
    """The sampled token of one position and the most likely alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Delta(NamedTuple):
    """What one step adds to one request: made and sent for every token, and so no dataclass, which takes three times as long. ``text`` is what may be shown already (stop strings are held back).

    ``stop`` names what ended it: a stop string, or a token id in decimal. Usage counts are totals so far.
    ``started``, in the first delta with a token only, is when the request's first step began, monotonic time, seconds.
    ``prompt_logprobs`` are those of the next prompt tokens, the second one's first; they come before anything that is generated.
    ``vector`` is the whole answer of a request that embeds: pooled, not normalised, float32, little endian.
    """

    id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Position, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: "Failure | None" = None
    reasoning_tokens: int = 0
    started: float | None = None
    prompt_logprobs: tuple[Position, ...] = ()
    vector: bytes = b""


class Failure(Struct, frozen=True):
    """An AtlasError as a value. ``type`` is the class name; the rest are its attributes."""

    type: str
    what: str
    why: str = ""
    cure: str = ""
    kind: str = ""
    field: str | None = None
    code: str | None = None
    retry_after: float | None = None


class Gauges(Struct, frozen=True):
    """The engine's load, sent with every step.

    ``kv_tokens_kept`` positions hold something that nobody uses now and a prompt may begin with; they count as free. ``kv_tokens_evicted``
    of such were given away since the start. ``kv_tokens_stateless`` were there and were computed again, since no recurrent state was kept.
    ``experts_read`` counts the distinct ones of each of ``mixtures_run`` in steps of decoding; both stay 0 unless they are counted.
    """

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    steps: int = 0
    preemptions: int = 0
    kv_tokens_kept: int = 0
    kv_tokens_evicted: int = 0
    kv_tokens_stateless: int = 0
    experts_read: int = 0
    mixtures_run: int = 0


class StepResult(Struct, frozen=True):
    """What requests gained by a step, and the load after it; a step of many rows gives several of these, one after the other."""

    deltas: tuple[Delta, ...]
    gauges: Gauges


class Progress(Struct, frozen=True):
    """Start-up goes on: ``done`` of ``total`` (bytes or items; total 0 when unknown) in ``phase``."""

    phase: str
    done: int
    total: int
    note: str = ""


class LedgerEntry(Struct, frozen=True):
    """One finished start-up phase."""

    phase: str
    seconds: float
    bytes: int = 0


class Ready(Struct, frozen=True):
    """The engine serves. Everything the API process must know about the model that it did not read itself.

    The cache has pages of ``page_tokens`` positions, ``kv_tokens`` in all; 0 where there is none. ``settings`` are (name, value,
    source) of those that machine or model have decided. ``vector_size`` is how many numbers a vector has, of a model that embeds texts and
    does nothing else; 0 of others.
    """

    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    fingerprint: str
    ledger: tuple[LedgerEntry, ...] = ()
    budget: tuple[tuple[str, int], ...] = ()
    page_tokens: int = 0
    kv_tokens: int = 0
    settings: tuple[tuple[str, str, str], ...] = ()
    vector_size: int = 0


class Faulted(Struct, frozen=True):
    """The engine is of no more use; every request on it has failed."""

    failure: Failure


class Hello(Struct, frozen=True):
    """First message of both sides; a peer that speaks another version is refused."""

    version: int
    plugins: tuple[tuple[str, str], ...] = field(default=())


ToEngine = Hello | Generate | Abort | Drain
FromEngine = Hello | Progress | Ready | StepResult | Faulted

"""The shapes of answers, for the API document. Answers are built where they are made; tests hold them against these."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Finish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class PromptDetails(Struct):
    """``cached_tokens``: those that were not computed again. What is written into the cache is not counted."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(Struct):
    """``reasoning_tokens``: those of thoughts."""

    reasoning_tokens: int


class Usage(Struct):
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenAlternative(Struct):
    """A token that might have been. ``bytes`` are its own, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenProbability(TokenAlternative):
    """A generated token; ``top_logprobs`` are the likeliest at its place, best first."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Struct):
    """Log-probabilities of the tokens of an answer."""

    content: list[TokenProbability] | None
    refusal: None


class FunctionCall(Struct):
    """``arguments`` is JSON, as text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Struct):
    """An answer. ``content`` is null where there are calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One of ``n`` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """A name, or a piece of arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """What call ``index`` gained; the first has ``id``, ``type`` and the function's name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """What an answer gained."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What choice ``index`` gained."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """One event of a stream, which ends with ``[DONE]``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class LegacyLogprobs(Struct):
    """Columns, one row a token; ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct):
    """One of the answers to one of the prompts."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(Struct):
    """A whole answer, or one event of a stream, which ends with ``[DONE]``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelMeta(Struct):
    """Entries of the vocabulary, and tokens of the context, under llama.cpp's names."""

    n_vocab: int
    n_ctx: int


class Model(Struct):
    """A name that the model answers to. ``created`` is Unix time, seconds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    meta: ModelMeta


class ModelList(Struct):
    """Every name that the model answers to. ``models``, which Codex reads, has those that it would need instructions for: none."""

    object: Literal["list"]
    data: list[Model]
    models: list[str] | UnsetType = UNSET


class ModelTag(Struct):
    """A name that the model answers to, as Ollama tells it. ``digest`` identifies model, plugins and settings."""

    name: str
    model: str
    modified_at: str
    digest: str


class ModelTags(Struct):
    """Every name that the model answers to."""

    models: list[ModelTag]


class Piece(Struct):
    """A token with its text; with its bytes where they are only part of a character."""

    id: int
    piece: str | list[int]


class ModelInfo(Struct):
    """A name that the model answers to, as Anthropic tells it. Prompt and answer share the context, ``max_tokens``."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(Struct):
    """Some of the names; ``has_more`` says whether there are others in the direction that was asked for."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelQuery(Struct):
    """``before_id`` and ``after_id`` are names; without the header anthropic-version all are listed, and none of these counts.

    ``client_version`` is what Codex gives itself away by.
    """

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    before_id: str | None = None
    after_id: str | None = None
    client_version: str | None = None


class Tokenized(Struct):
    """Ids, how many they are, and how many fit."""

    tokens: list[int | Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Rendered(Struct):
    """A conversation as the model reads it."""

    prompt: str


class Embedding(Struct):
    """One vector: numbers, or the base64 of their little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    """What the request took, in tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """Vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Setting(Struct):
    """A value as shown, and where it came from."""

    value: str
    source: str


class EngineInfo(Struct):
    """What the engine said of itself: limits in tokens and sequences, memory in bytes, the phases of its start in seconds."""

    max_seq_len: int
    max_batch_size: int
    vocab_size: int
    fingerprint: str
    memory: dict[str, int]
    start: dict[str, float]


class ServerInfo(Struct):
    """What this server is and how it was set up; secrets are counted, not shown. ``engine`` is null until it is ready."""

    version: str
    status: str
    models: list[str]
    settings: dict[str, Setting]
    engine: EngineInfo | None


class Detokenized(Struct):
    """The text, under every name in use."""

    prompt: str
    text: str
    content: str


class LoadProgress(Struct):
    """How far loading is: ``done`` of ``total``, which is 0 when unknown."""

    phase: str
    done: int
    total: int
    note: str


class HealthState(Struct):
    """Whether requests are served; ``message``, ``why`` and ``cure`` are those of a fault."""

    status: Literal["loading", "ready", "faulted", "draining", "gone"]
    progress: LoadProgress | UnsetType = UNSET
    message: str | UnsetType = UNSET
    why: str | UnsetType = UNSET
    cure: str | UnsetType = UNSET


class Version(Struct):
    """The version of Atlas."""

    version: str


JsonObject = dict[str, Any]

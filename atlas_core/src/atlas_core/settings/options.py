"""The table of options: one field of ``Settings`` each, with its type, default, help and check. Flags, variables and keys follow."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.settings.kinds import (
    Kind,
    choice,
    filling,
    integer,
    many,
    number,
    origin,
    seconds,
    size,
    switch,
    text,
    url,
)
from atlas_core.settings.sources import BUILT_IN, Level, Source

_MODELS_OWN = "the model's own"


class Option(Struct, frozen=True):
    """One option. ``name`` is the field and the key of a settings file; ``aliases`` are further flags.

    ``section`` groups help. ``secret`` values are never shown. ``unset`` says what happens when the default None stays.
    """

    name: str
    kind: Kind
    help: str
    section: str
    default: Any
    aliases: tuple[str, ...] = ()
    secret: bool = False
    unset: str = ""

    @property
    def flag(self) -> str:
        """The flag, as typed; the model is an argument without one."""
        return "MODEL" if self.name == "model" else f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"ATLAS_{self.name.upper()}"


def _option(
    kind: Kind, section: str, about: str, *, aliases: tuple[str, ...] = (), secret: bool = False, unset: str = ""
) -> Option:
    """What the type of a field of Settings is annotated with; the field's own name and default complete it."""
    return Option("", kind, about, section, None, aliases, secret, unset)


class Settings(Struct, frozen=True):
    """What was asked for; None means that the value is decided later, from the model and the machine, as ``unset`` says.

    ``sources`` has the origin of each value that is not built-in; ``source`` looks one up.
    """

    model: Annotated[
        str | None,
        _option(text("MODEL"), "Model", "Hub id, directory, .gguf file or catalogue name.", unset="must be given"),
    ] = None
    revision: Annotated[
        str | None,
        _option(text("REV"), "Model", "Branch, tag or commit of a Hub repository.", unset="the catalogue's, else main"),
    ] = None
    load_format: Annotated[
        str,
        _option(
            choice("auto", "dummy"),
            "Model",
            "auto reads the weights; dummy invents seeded ones, to measure without them.",
        ),
    ] = "auto"
    transcode: Annotated[
        str,
        _option(
            choice("none", "bf16", "f16", "f32"),
            "Model",
            "Decode every matrix to this type at the start, for weights that no kernel reads; costs the memory that explain shows.",
        ),
    ] = "none"
    packed_cache: Annotated[
        str | None,
        _option(
            text("DIR"),
            "Model",
            "Keep the weights there as this machine wants them: later starts read one file, with checksums, and convert nothing.",
            unset="weights are packed at every start",
        ),
    ] = None
    start_cache: Annotated[
        str | None,
        _option(
            text("DIR|none"),
            "Model",
            "Keep there what a start finds and plans; later ones take it again while nothing that it depends on has changed. none: plan at "
            "every start.",
            unset="the folder starts of Atlas's cache",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _option(
            text("PATH|TEMPLATE"), "Model", "Jinja chat template, or the path of one.", unset="the checkpoint's own"
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _option(
            text("DIALECT"), "Model", "How the model writes tool calls; plain: it calls none.", unset="by its template"
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _option(
            text("DIALECT"), "Model", "How the model marks its thoughts; plain: not at all.", unset="by its template"
        ),
    ] = None
    disable_thinking: Annotated[bool, _option(switch(), "Model", "Ask the model for answers without a thought.")] = (
        False
    )
    max_thinking_budget: Annotated[
        int | None,
        _option(
            integer(0),
            "Model",
            "Most tokens of a thought, which is then ended, at medium effort; minimal is a quarter of it, low half, high twice, xhigh "
            "and max four times as many; 0 asks for none.",
            unset="no limit",
        ),
    ] = None
    default_temperature: Annotated[
        float | None,
        _option(
            number(0, 100), "Model", "Randomness of the next token, where a request does not say.", unset=_MODELS_OWN
        ),
    ] = None
    default_top_p: Annotated[
        float | None,
        _option(
            number(0, 1),
            "Model",
            "Mass of the tokens that are drawn from, where a request does not say.",
            unset=_MODELS_OWN,
        ),
    ] = None
    default_top_k: Annotated[
        int | None,
        _option(
            integer(0),
            "Model",
            "How many of the best tokens are drawn from, 0 for all, where a request does not say.",
            unset=_MODELS_OWN,
        ),
    ] = None
    default_min_p: Annotated[
        float | None,
        _option(
            number(0, 1),
            "Model",
            "Least probability, of the best token's, to be drawn, where a request does not say.",
            unset=_MODELS_OWN,
        ),
    ] = None
    default_presence_penalty: Annotated[
        float | None,
        _option(
            number(-2, 2),
            "Model",
            "What having been generated costs a token, where a request does not say.",
            unset=_MODELS_OWN,
        ),
    ] = None
    default_frequency_penalty: Annotated[
        float | None,
        _option(number(-2, 2), "Model", "What each time costs it, where a request does not say.", unset=_MODELS_OWN),
    ] = None
    default_repetition_penalty: Annotated[
        float | None,
        _option(
            number(0.001, 100),
            "Model",
            "What a token's logit is divided by, or multiplied, once it has occurred, where a request does not say.",
            unset=_MODELS_OWN,
        ),
    ] = None
    hardware: Annotated[
        str | None,
        _option(
            text("NAME"), "Machine", "The hardware plugin to use.", aliases=("--hw",), unset="the best that is present"
        ),
    ] = None
    numerics: Annotated[
        str,
        _option(choice("exact", "fast"), "Machine", "exact computes as the fp32 reference does; fast may round more."),
    ] = "exact"
    dtype: Annotated[
        str, _option(choice("f32", "bf16", "f16"), "Machine", "Type of activations; kernels must exist for it.")
    ] = "f32"
    block_size: Annotated[int, _option(integer(1, 1024), "Machine", "Tokens of one page of the KV cache.")] = 16
    prefix_cache: Annotated[
        bool,
        _option(
            switch(),
            "Machine",
            "Keep what was computed of a prompt, for later prompts that begin alike.",
            aliases=("--enable-prefix-caching",),
        ),
    ] = True
    state_snapshots: Annotated[
        int,
        _option(
            integer(0, 65536),
            "Machine",
            "Recurrent states kept for the prefix cache, of models that have such; each is as large as a running sequence's.",
            aliases=("--ssm-cache-slots",),
        ),
    ] = 16
    threads: Annotated[
        int | None,
        _option(
            integer(1, 4096), "Machine", "Threads that compute.", unset="as many as there are processors; CPU only"
        ),
    ] = None
    memory: Annotated[
        int | None,
        _option(
            size(), "Machine", "The most memory to use, weights and caches together.", unset="what the machine has free"
        ),
    ] = None
    max_seq_len: Annotated[
        int | None,
        _option(
            integer(1), "Limits", "Most tokens of prompt and answer together.", unset="the model's own, at most 32768"
        ),
    ] = None
    max_batch_size: Annotated[int, _option(integer(1, 4096), "Limits", "Most sequences computed in one step.")] = 8
    max_prefill_tokens: Annotated[int, _option(integer(1), "Limits", "Most prompt tokens computed in one step.")] = 8192
    max_mixed_tokens: Annotated[
        int | None,
        _option(
            integer(1),
            "Limits",
            "Most tokens of a step in which some sequences decode and others read prompts, a quarter of them for prompts at least: fewer "
            "make shorter pauses between tokens. Prompt tokens behind a long context count for more, as they take longer.",
            unset="a prompt's pieces are as long as alone",
        ),
    ] = None
    mixed_steps: Annotated[
        tuple[str, ...],
        _option(
            many(filling()),
            "Limits",
            "Sizes of such steps that fill the machine, and what their products cost, in tokens of the size that fills it best (as many as it "
            "has, unless given): a prompt is cut where it gets the most tokens for that.",
            unset="every token costs the same",
        ),
    ] = ()
    attention_cost: Annotated[
        float,
        _option(
            number(0.01, 100),
            "Limits",
            "How many times as long an operation of a prompt's attention takes in such a step as one of its products.",
        ),
    ] = 1.0
    max_queue: Annotated[
        int, _option(integer(0), "Limits", "Most requests that wait; further ones are answered 429.")
    ] = 128
    max_body: Annotated[int, _option(size(), "Limits", "Largest request body; larger ones are answered 413.")] = (
        32 * 2**20
    )
    rate_limit_requests: Annotated[
        int | None,
        _option(
            integer(1),
            "Limits",
            "Most requests a minute of one API key, or of one address where no keys are asked for.",
            unset="no limit",
        ),
    ] = None
    rate_limit_tokens: Annotated[
        int | None,
        _option(
            integer(1), "Limits", "Most tokens a minute of one client, prompts and answers together.", unset="no limit"
        ),
    ] = None
    rate_limit_burst: Annotated[
        float,
        _option(seconds(), "Limits", "For how long a quiet client saves up requests and tokens, to ask for at once."),
    ] = 60.0
    body_timeout: Annotated[
        float,
        _option(seconds(), "Limits", "How long a request body may take, and longer only at 16 KiB a second or more."),
    ] = 60.0
    bind: Annotated[str, _option(text("ADDRESS"), "Server", "Address to listen on; 0.0.0.0 is every interface.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _option(integer(0, 65535), "Server", "Port to listen on; 0 takes a free one.")] = 8888
    served_model_name: Annotated[
        tuple[str, ...],
        _option(many(text("NAME")), "Server", "Name that clients use; may be repeated.", unset="MODEL as given"),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        _option(
            many(text("KEY")),
            "Server",
            "Key that clients must send; may be repeated.",
            secret=True,
            unset="no key is asked for",
        ),
    ] = ()
    strict_model_name: Annotated[
        bool,
        _option(switch(), "Server", "Answer 404 to requests for a model of another name, which are served otherwise."),
    ] = False
    api_keys_file: Annotated[
        str | None,
        _option(
            text("FILE"),
            "Server",
            "File of further keys, KEY or NAME:KEY a line; read again when it changes, and on SIGHUP.",
            unset="no file",
        ),
    ] = None
    require_auth: Annotated[bool, _option(switch(), "Server", "Refuse to start without any key.")] = False
    public_metrics: Annotated[bool, _option(switch(), "Server", "Serve /metrics without a key.")] = False
    metrics_aliases: Annotated[
        tuple[str, ...],
        _option(
            many(choice("vllm", "sglang", "llamacpp")),
            "Server",
            "Give metrics the names of another server too.",
            unset="own names only",
        ),
    ] = ()
    reasoning_name: Annotated[
        tuple[str, ...],
        _option(
            many(choice("reasoning_content", "reasoning")),
            "Server",
            "What chat answers call thoughts; both where both are given.",
            unset="reasoning_content",
        ),
    ] = ()
    otlp_endpoint: Annotated[
        str | None,
        _option(
            url(),
            "Server",
            "OpenTelemetry collector to send traces and metrics to, OTLP over HTTP, such as http://localhost:4318.",
            unset="nothing is sent",
        ),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        _option(
            many(origin()),
            "Server",
            "Origin whose web pages may use the server; may be repeated; * is all.",
            unset="none",
        ),
    ] = ()
    tls_cert: Annotated[
        str | None, _option(text("FILE"), "Server", "Certificate chain, PEM, to serve HTTPS with.", unset="plain HTTP")
    ] = None
    tls_key: Annotated[
        str | None,
        _option(text("FILE"), "Server", "Private key of the certificate, PEM, without a password.", unset="plain HTTP"),
    ] = None
    store: Annotated[
        str,
        _option(
            text("PATH|memory|none"),
            "Server",
            "Where responses and conversations are kept: a file that outlives the server, memory, or nowhere.",
        ),
    ] = "memory"
    store_max_entries: Annotated[
        int, _option(integer(1), "Server", "Most responses and conversations kept; the oldest are forgotten first.")
    ] = 10_000
    store_max_bytes: Annotated[
        int,
        _option(size(), "Server", "Most bytes of responses and conversations kept; the oldest are forgotten first."),
    ] = 256 * 2**20
    store_retention: Annotated[
        int, _option(integer(1, 36500), "Server", "Days after which a response or conversation is forgotten.")
    ] = 30
    drain_timeout: Annotated[
        float, _option(seconds(), "Server", "How long running requests may finish after SIGTERM.")
    ] = 15.0
    exit_on_fault: Annotated[
        bool,
        _option(
            switch(), "Server", "End with an exit code when the engine has failed, for whoever starts it again then."
        ),
    ] = False
    log_level: Annotated[
        str, _option(choice("debug", "info", "warning", "error"), "Server", "Least serious message to log.")
    ] = "info"
    log_format: Annotated[
        str, _option(choice("text", "json"), "Server", "One line of text a request, or one JSON object.")
    ] = "text"
    count_experts: Annotated[
        bool,
        _option(
            switch(),
            "Server",
            "Count the distinct experts that steps of decoding read, for /metrics; without ops that keep the choice to themselves, so slower.",
        ),
    ] = False
    sources: tuple[tuple[str, Source], ...] = ()

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={shown!r}' for name, shown, _ in self.rows())})"

    def source(self, name: str) -> Source:
        """Where the value of the option ``name`` came from. Raises KeyError for what is not an option."""
        return dict(self.sources).get(OPTIONS[name].name, BUILT_IN)

    def rows(self, *levels: Level) -> Iterator[tuple[str, str, str]]:
        """(name, value as shown, source) of every option, in the order of the table; secrets are counted, not shown.

        With ``levels``, only those whose source is of one of them.
        """
        for name, option in OPTIONS.items():
            source = self.source(name)
            if not levels or source.level in levels:
                yield name, _shown(option, getattr(self, name)), str(source)


def _shown(option: Option, value: Any) -> str:
    if value is None or value == ():
        return f"({option.unset})"
    if option.secret:
        return f"({len(value)} given)"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _table() -> Iterator[Option]:
    defaults = Settings()
    for name, kind in Settings.__annotations__.items():
        for made in getattr(kind, "__metadata__", ()):
            yield replace(made, name=name, default=getattr(defaults, name))


OPTIONS: Mapping[str, Option] = MappingProxyType({option.name: option for option in _table()})
"""Every option by name."""

OTHER_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "ATLAS_CONFIG": "path of the settings file",
        "ATLAS_PLUGINS": "comma-separated distributions or keys to load; all when unset",
        "ATLAS_TRACE_PLUGINS": "1 prints each hook call",
        "ATLAS_TARGET_HW": "kernels build: hardware to build for, * for all",
        "ATLAS_TARGET_MODEL": "kernels build: model to build for, * for all",
        "ATLAS_TARGET_QUANT": "kernels build: storage to build for, * for all",
        "ATLAS_SKIP_BUILD": "1 makes kernels build do nothing",
        "ATLAS_SHARED": "tests: folder of shared test inputs",
    }
)
"""Variables that are read elsewhere, with what they do; any further ATLAS_* variable is a mistake."""

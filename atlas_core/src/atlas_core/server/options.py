"""What the operator chose for the server."""

from pathlib import Path

from msgspec import Struct, field

from atlas_core.server.rates import Rates
from atlas_core.settings import Settings
from atlas_core.vocab.errors import UsageError


class ServerOptions(Struct, frozen=True):
    """``max_queue`` sequences wait beside those that run; ``max_body`` is bytes; the rest of the numbers are seconds.

    ``strict_model`` answers 404 to requests for a model of another name, which are served otherwise. ``json_logs`` writes one
    JSON object a request instead of a line of text. ``api_keys_file`` has further keys; ``public_metrics`` are read without one.
    ``rates`` are those of one client. ``cors_origins`` are the origins whose pages may ask, ``*`` being all.
    ``reasoning_names`` are what chat answers call thoughts.
    ``metrics_aliases`` name other servers whose names of metrics are told beside our own.
    ``loopback``: only this machine can reach the server.
    ``exit_on_fault`` ends the server when its engine has failed, instead of telling so until somebody ends it.
    ``tls`` are the paths of a chain of certificates and of its key. ``settings`` is what the operator may look up.
    """

    api_keys: tuple[str, ...] = ()
    max_queue: int = 128
    max_body: int = 32 * 2**20
    drain_timeout: float = 15.0
    exit_on_fault: bool = False
    ping_interval: float = 10.0
    strict_model: bool = False
    json_logs: bool = False
    api_keys_file: Path | None = None
    public_metrics: bool = False
    rates: Rates = field(default_factory=Rates)
    body_timeout: float = 60.0
    cors_origins: tuple[str, ...] = ()
    metrics_aliases: tuple[str, ...] = ()
    reasoning_names: tuple[str, ...] = ("reasoning_content",)
    loopback: bool = True
    tls: tuple[Path, Path] | None = None
    settings: Settings | None = None

    @classmethod
    def of(cls, settings: Settings) -> "ServerOptions":
        """The server's part of the settings. Raises UsageError for those that contradict one another."""
        if settings.require_auth and not settings.api_key and settings.api_keys_file is None:
            raise UsageError(
                "--require-auth is given, and there are no keys", "nobody could use the server",
                "give --api-keys-file FILE, or --api-key KEY",
            )  # fmt: skip
        if (settings.tls_cert is None) != (settings.tls_key is None):
            raise UsageError(
                "TLS needs a certificate and its key", "only one of the two is given", "give --tls-cert and --tls-key"
            )
        return cls(
            api_keys=settings.api_key,
            max_queue=settings.max_queue,
            max_body=settings.max_body,
            drain_timeout=settings.drain_timeout,
            exit_on_fault=settings.exit_on_fault,
            strict_model=settings.strict_model_name,
            json_logs=settings.log_format == "json",
            api_keys_file=None if settings.api_keys_file is None else Path(settings.api_keys_file),
            public_metrics=settings.public_metrics,
            rates=Rates(settings.rate_limit_requests, settings.rate_limit_tokens, settings.rate_limit_burst),
            body_timeout=settings.body_timeout,
            cors_origins=settings.cors_origin,
            metrics_aliases=settings.metrics_aliases,
            reasoning_names=settings.reasoning_name or ("reasoning_content",),
            tls=(Path(settings.tls_cert), Path(settings.tls_key)) if settings.tls_cert and settings.tls_key else None,
            settings=settings,
        )

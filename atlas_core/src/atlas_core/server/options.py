"""What the operator chose for the server."""

from dataclasses import dataclass

from atlas_core.settings import Settings


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``max_queue`` sequences wait beside those that run; ``max_body`` is bytes; the rest of the numbers are seconds.

    ``strict_model`` answers 404 to requests for a model of another name, which are served otherwise. ``json_logs`` writes one
    JSON object a request instead of a line of text.
    """

    api_keys: tuple[str, ...] = ()
    max_queue: int = 128
    max_body: int = 32 * 2**20
    drain_timeout: float = 15.0
    ping_interval: float = 10.0
    strict_model: bool = False
    json_logs: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "ServerOptions":
        """The server's part of the settings."""
        return cls(settings.api_key, settings.max_queue, settings.max_body, settings.drain_timeout)

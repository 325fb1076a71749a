"""Endpoints that clients of other servers know and this one has not: told apart from paths that nobody knows. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from atlas_core.vocab.errors import RequestError

_ANSWERS = ("this server answers conversations and texts, and embeds texts, only", "")
_ADAPTERS = ("this server loads no LoRA adapters", "merge the adapter into its model, and serve that checkpoint")
_SLEEP = ("the model stays in memory while the server runs", "stop the server to free the memory")
_ROUTER = ("one server serves one model", "start a server for each model")
_OLLAMA = ("of Ollama's own interface there is /api/tags only", "use /v1/chat/completions, as Ollama has it too")
_KEPT = ("answers of the chat endpoint are not kept", "use /v1/responses, which are")

ABSENT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{
            f"/v1/{name}": _ANSWERS
            for name in (
                "assistants", "audio", "batches", "containers", "evals", "files", "fine_tuning", "images",
                "messages/batches", "moderations", "realtime", "rerank", "score", "threads", "uploads", "vector_stores",
                "videos",
            )
        },
        "/pooling": _ANSWERS, "/classify": _ANSWERS, "/score": _ANSWERS, "/rerank": _ANSWERS,
        "/v1/load_lora_adapter": _ADAPTERS, "/v1/unload_lora_adapter": _ADAPTERS, "/v1/lora": _ADAPTERS,
        "/sleep": _SLEEP, "/wake_up": _SLEEP, "/is_sleeping": _SLEEP, "/release_memory_occupation": _SLEEP,
        "/resume_memory_occupation": _SLEEP,
        "/models/load": _ROUTER, "/models/unload": _ROUTER,
        "/api": _OLLAMA,
        "/v1/chat/completions": _KEPT,
    }
)  # fmt: skip
"""By path, that of a whole family or of one endpoint: why it is not here, and what to do instead."""


def absent(path: str) -> RequestError | None:
    """The answer, 501, to a path that the router does not have; None where nobody would expect one."""
    found = next((name for name in ABSENT if path == name or path.startswith(f"{name}/")), None)
    if found is None:
        return None
    why, cure = ABSENT[found]
    return RequestError(f"{found} is not implemented", why, cure, kind="not_implemented")

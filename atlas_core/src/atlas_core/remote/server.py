"""One server, reached by its URL: its models, and streams of answers."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from atlas_core.remote.events import event_data
from atlas_core.vocab.errors import EngineError, RequestError, UsageError

_DONE = "[DONE]"
_LONGEST_ERROR = 1 << 20
_KINDS = {
    401: "unauthorized", 403: "unauthorized", 404: "not_found", 413: "too_large", 429: "overloaded", 501: "unsupported",
}  # fmt: skip


class RemoteServer:
    """``url`` is that of an OpenAI-compatible server, with or without its ``/v1``. Threads may share one; each call connects anew."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        """``timeout`` is in seconds for each wait: to connect, and for the next bytes. Raises UsageError for what is no URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise UsageError(
                f"{url} is not the URL of a server", "it has the form http://HOST:PORT or https://HOST", "correct --url"
            )
        self._https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{parts.scheme}://{host}{f':{port}' if port else ''}{self._base}"
        self._key = api_key
        self._timeout = timeout

    def models(self) -> list[str]:
        """The names that the server answers to. Raises EngineError or RequestError."""
        with self._request("GET", "/models") as response:
            listed = self._json(response.read())
        entries = listed.get("data")
        ids = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        names = [name for name in ids if isinstance(name, str)]
        if not names:
            raise self._strange("its list of models is empty or not understood")
        return names

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Every event of a streamed answer to ``body``, as soon as it comes.

        Raises RequestError when the server refuses, EngineError when it fails, cannot be reached, or breaks off before the end.
        """
        with self._request("POST", path, {**body, "stream": True}) as response:
            for data in event_data(iter(response.readline, b"")):
                if data == _DONE:
                    return
                event = self._json(data)
                if isinstance(event.get("error"), dict):
                    raise EngineError(f"{self.url} failed while it answered", _message(event["error"]), "see its log")
                yield event
        raise EngineError(
            f"{self.url} broke off its answer", "the stream ended without [DONE]", "see its log", state="gone"
        )

    @contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[HTTPResponse]:
        kind = HTTPSConnection if self._https else HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        headers = {"Accept": "application/json, text/event-stream"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            # A request is one small write; waiting for more would only delay it.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request(method, self._base + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
            yield response
        except (OSError, HTTPException) as error:
            raise EngineError(
                f"{self.url} cannot be reached or does not answer",
                str(error) or type(error).__name__,
                "start a server there, for example with atlas serve; or correct --url",
                state="gone",
            ) from error
        finally:
            connection.close()

    def _refusal(self, response: HTTPResponse) -> RequestError | EngineError:
        text = response.read(_LONGEST_ERROR).decode("utf-8", errors="replace")
        try:
            said = _message(json.loads(text)["error"])
        except (ValueError, LookupError, TypeError):
            said = " ".join(text.split())[:300]
        what = f"{self.url} answered {response.status}: {said or response.reason}"
        if response.status >= 500 and response.status != 501:
            return EngineError(what, "", "see its log; if it is still loading, try again soon")
        cure = "set ATLAS_API_KEY, or give --api-key" if response.status in (401, 403) else ""
        return RequestError(what, "", cure, kind=_KINDS.get(response.status, "invalid"))

    def _json(self, text: str | bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._strange("it did not answer with a JSON object")
        return value

    def _strange(self, why: str) -> EngineError:
        return EngineError(f"{self.url} is no OpenAI-compatible server", why, "correct --url")


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)

"""From a bound socket to an exit code: uvicorn, signals, draining."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn

from atlas_core.server.app import Application
from atlas_core.server.bounds import MAX_HEADER_BYTES
from atlas_core.server.listen import url_of
from atlas_core.server.logs import configure
from atlas_core.server.protocol import PatientProtocol
from atlas_core.vocab.errors import UsageError

_LOG = logging.getLogger("atlas.server")
_LAST_WORDS_S = 2
"""Seconds for answers that are already being written when the server goes down."""


def check_tls(certificate: Path, key: Path) -> None:
    """Raises UsageError when the files are not a certificate and its key, told apart as well as OpenSSL can."""
    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read", error.strerror or str(error), "see --tls-cert and --tls-key"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for on the terminal, and a service has none.
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        why = f"one of them is not PEM ({error})"
        if error.reason == "KEY_VALUES_MISMATCH":
            why = "the key belongs to another certificate"
        raise UsageError(
            f"{certificate} and {key} cannot be used for TLS", why, "give a chain and its key, both PEM"
        ) from error


def _no_password() -> str:
    raise UsageError(
        "the TLS key has a password", "nobody is there to type it", "give a key without one: openssl pkey -in KEY"
    )


def run(app: Application, listener: socket.socket, *, log_level: str = "info") -> int:
    """Serve until SIGTERM or SIGINT, and give the exit code 0.

    The first signal drains: new requests get 503, running ones finish, up to the options' ``drain_timeout``. A second one ends
    the process on the spot, with 128 + its number. Raises what bringing up raised, and the engine's fault where the options end the server for it. Configures the loggers ``atlas`` and ``uvicorn``; to be called in the main thread.
    """
    configure(log_level, as_json=app.options.json_logs)
    app.url = url_of(listener, "https" if app.options.tls else "http")
    server = DrainingServer(app)
    app.failed = server.stop
    server.run(sockets=[listener])
    if app.lifecycle.error is not None:
        raise app.lifecycle.error
    if server.fault is not None:
        raise server.fault
    return 0


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose first signal drains instead of closing the door."""

    def __init__(self, app: Application) -> None:
        tls = app.options.tls
        super().__init__(
            uvicorn.Config(
                app.asgi, log_config=None, access_log=False, lifespan="on", ws="none", http=PatientProtocol, loop="asyncio",
                server_header=False, timeout_keep_alive=60, timeout_graceful_shutdown=_LAST_WORDS_S,
                # Whoever sends X-Forwarded-For could say what it likes, and have limits of its own.
                proxy_headers=False, h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
                ssl_certfile=tls and tls[0], ssl_keyfile=tls and tls[1],
            )
        )  # fmt: skip
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self.fault: Exception | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on ``sockets`` until stopped."""
        self._loop = asyncio.get_running_loop()
        # Without anything to read again, a hangup ends the server, as it ends every program.
        if (self._app.options.tls or self._app.options.api_keys_file) and _in_main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self.reload)
        await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn asks ten times a second whether to end: when told to, or when the engine has failed and the options say so."""
        lifecycle = self._app.lifecycle
        if self._app.options.exit_on_fault and self._drain is None and lifecycle.state == "faulted":
            self.fault = lifecycle.fault
            return True
        return await super().on_tick(counter)

    def reload(self) -> None:
        """Read keys and certificates again; what cannot be used leaves the old ones in place."""
        self._app.keys.reload()
        if self._app.options.tls and self.config.ssl is not None:
            try:
                check_tls(*self._app.options.tls)
                self.config.ssl.load_cert_chain(*self._app.options.tls)
            except UsageError as error:
                _LOG.error("the certificate was not read again, the old one stays: %s: %s", error.what, error.why)
            else:
                _LOG.info("certificate read again from %s", self._app.options.tls[0])

    def stop(self) -> None:
        """Go down now, without waiting for running requests beyond their last words."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. Not the parent's: that one raises the signal again at the end, and the exit code would not be 0."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drain_and_stop())
            return
        # Nothing orderly is left to wait for; the engine process ends when its socket to this one closes.
        sys.stderr.flush()
        os._exit(128 + sig)

    async def _drain_and_stop(self) -> None:
        try:
            await self._app.drain()
        finally:
            self.stop()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

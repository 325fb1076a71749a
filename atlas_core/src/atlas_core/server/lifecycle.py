"""The server's own life: loading, ready, faulted, draining, gone."""

import asyncio
from collections.abc import Awaitable, Callable

from atlas_core.server.ports import BringUp, Reporter, Service
from atlas_core.vocab.errors import AtlasError, EngineError
from atlas_core.vocab.messages import Progress

_LAST_ERRORS_S = 1.0
"""Seconds for streams to tell their clients that they were cut off."""

_WHY = {
    "loading": ("the model is still being loaded", "try again soon; /health tells how far it is"),
    "faulted": ("the engine has failed and cannot go on", "the server has to be restarted; its log says what happened"),
    "draining": ("the server is shutting down", "send the request to another one, or again after the restart"),
    "gone": ("the engine has ended", "the server has to be restarted"),
}


class Lifecycle:
    """Brings the service up in the background, and down in good order. Used on the event loop's thread only."""

    def __init__(self, bring_up: BringUp, reporter: Reporter) -> None:
        self._bring_up = bring_up
        self._reporter = reporter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._service: Service | None = None
        self._draining = False
        self.progress = Progress("starting", 0, 0)
        self.error: Exception | None = None

    @property
    def state(self) -> str:
        """loading, ready, faulted, draining or gone. A fault outranks everything: it is what the operator has to know."""
        engine = None if self._service is None else self._service.engine.state
        if self.error is not None or engine == "faulted":
            return "faulted"
        if self._draining:
            return "draining"
        return "loading" if engine is None else engine

    @property
    def fault(self) -> Exception | None:
        """What made the state ``faulted``: the start, or the engine later."""
        return self.error or (None if self._service is None else self._service.engine.fault)

    @property
    def known(self) -> Service | None:
        """The service once it was brought up, whatever became of it."""
        return self._service

    def service(self) -> Service:
        """The service, ready for requests. Raises EngineError with the state when it is not."""
        state = self.state
        if self._service is None or state != "ready":
            why, cure = _WHY[state]
            raise EngineError("requests cannot be served now", why, cure, state=state)
        return self._service

    def start(self, url: str, failed: Callable[[], None]) -> None:
        """Begin to bring up; ``failed`` is called if that comes to nothing, with ``error`` set before."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(url, failed))

    async def drain(self, seconds: float, emptied: Awaitable[object]) -> None:
        """Refuse new requests and let the running ones finish: until ``emptied``, but ``seconds`` at most.

        Then the engine ends, and what still runs fails with an error of its own. A service that is not there yet is given up.
        """
        self._draining = True
        waiting = asyncio.ensure_future(emptied)
        try:
            if self._service is not None and not waiting.done():
                self._reporter.notice(f"draining: running requests have {seconds:g} s to finish")
                engine = asyncio.ensure_future(self._service.engine.drain(seconds))
                await asyncio.wait({waiting}, timeout=seconds)
                await self.close()
                await asyncio.gather(engine, return_exceptions=True)
                await asyncio.wait({waiting}, timeout=_LAST_ERRORS_S)
        finally:
            waiting.cancel()
            await self.close()

    async def close(self) -> None:
        """End everything; safe to call twice."""
        self._draining = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._service is not None:
            await self._service.engine.close()

    async def _run(self, url: str, failed: Callable[[], None]) -> None:
        try:
            self._service = await self._bring_up(self._on_progress)
        except Exception as error:  # noqa: BLE001 whatever it is, run() raises it again once the server is down
            self.error = error
            failed()
            return
        self._reporter.ready(url, self._service.engine.info)

    def _on_progress(self, progress: Progress) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, progress)

    def _tell(self, progress: Progress) -> None:
        self.progress = progress
        self._reporter.progress(progress)


def fault_parts(error: Exception | None) -> dict[str, str]:
    """``message``, ``why`` and ``cure`` of a fault, those that there are, for /health; defects are told in the log alone."""
    if not isinstance(error, AtlasError):
        return {"message": "the engine has failed" if error is None else "the server failed while starting"}
    parts = {"message": error.what, "why": error.why, "cure": error.cure}
    return {name: text for name, text in parts.items() if text}

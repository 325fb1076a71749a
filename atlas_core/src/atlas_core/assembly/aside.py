"""Parts of the start that need nobody's attention, on threads of their own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Aside:
    """Starts functions; leaving the block waits for them, so that nothing runs on when the start has failed."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, function: Callable[[], T]) -> "Future[T]":
        """The result to come; its ``result()`` raises what ``function`` raised."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 raised by who asks for the result
                future.set_exception(error)

        thread = threading.Thread(target=run, name="atlas-aside", daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.join()

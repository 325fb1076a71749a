"""Blocking work beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_background(function: Callable[[], T]) -> T:
    """The result of ``function``, run in a daemon thread of its own.

    Not ``asyncio.to_thread``: its threads are waited for when the loop and the process end, and a download or a slow disk would
    then hold up SIGTERM. Cancelled, this returns at once, and the thread's result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 raised again by who waits
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=body, name="atlas-background", daemon=True).start()
    return await future

"""Responses that are made in the background, and the events that they leave to be read."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

_ENDED_KEPT = 64


class EventLog:
    """The events of one stream, for any number of readers; event ``i`` has the number ``i``."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        """Put the events of ``data`` behind those that are there."""
        self._events += [event + b"\n\n" for event in data.split(b"\n\n") if event]
        self._wake()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._wake()

    async def read(self, first: int) -> AsyncGenerator[bytes, None]:
        """The events from number ``first`` on, those to come included."""
        while True:
            changed = self._changed
            if first < len(self._events):
                data = b"".join(self._events[first:])
                first = len(self._events)
                yield data
            elif self._ended:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Job:
    """One response in the making. ``body`` is the response object as it stands; ``log`` its events, if it was to be streamed."""

    def __init__(self, body: Mapping[str, Any], log: EventLog | None) -> None:
        self.body = body
        self.log = log
        self.task: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Cancel it, and wait until it has put everything in order."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


class Jobs:
    """The jobs of one server, by owner and id. Of those that have ended, the last 64 with a log are kept for their readers."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], Job] = {}

    def start(self, owner: str, job: Job, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work``, which keeps ``job`` up to date."""
        key = owner, job.body["id"]
        self._jobs[key] = job
        job.task = asyncio.create_task(work)
        job.task.add_done_callback(lambda _: self._ended(key))
        return job.task

    def find(self, owner: str, id: str) -> Job | None:  # noqa: A002 the word for it
        """The job that makes the response, or has made it lately."""
        return self._jobs.get((owner, id))

    def running(self, owner: str, id: str) -> Job | None:  # noqa: A002
        """The job that makes the response now."""
        job = self.find(owner, id)
        return job if job is not None and job.task is not None and not job.task.done() else None

    def forget(self, owner: str, id: str) -> None:  # noqa: A002
        """Drop what is kept of a job that has ended."""
        self._jobs.pop((owner, id), None)

    async def close(self) -> None:
        """Cancel every one."""
        await asyncio.gather(*(job.stop() for job in list(self._jobs.values())))

    def _ended(self, key: tuple[str, str]) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        if job.log is None:
            del self._jobs[key]
            return
        # The one that ended last stands last.
        self._jobs[key] = self._jobs.pop(key)
        over = [other for other, one in self._jobs.items() if one.task is not None and one.task.done()][:-_ENDED_KEPT]
        for other in over:
            del self._jobs[other]

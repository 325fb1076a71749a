"""Work in a process of its own, which a kernel may take down with it: the last thing that it began is known then."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from atlas_core.conformance.results import Report, Result
from atlas_core.plugins.probe import ending
from atlas_core.vocab.errors import AtlasError, KernelError

Tell = Callable[[Any], None]
"""Sends one of: Result with status "begun", any other Result, the Report at the end."""
Work = Callable[[Tell], None]
_JOIN = 10.0
"""Seconds that a process which has closed its end gets to end."""


def report_of(work: Work, heard: Callable[[Result], None]) -> Report:
    """Run ``work``, which must be picklable, apart, and give its report; ``heard`` gets each result as it comes.

    When the process dies, the trial that it had begun has failed, and the report is lost. Raises the AtlasError that ``work``
    raises, and KernelError when the process dies before the first trial.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share a driver that is already open
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(work, theirs), name="atlas-trials", daemon=True)
    child.start()
    theirs.close()
    try:
        return _follow(ours, child, heard)
    finally:
        ours.close()
        child.terminate()
        child.join()


def _follow(
    connection: Connection, child: multiprocessing.process.BaseProcess, heard: Callable[[Result], None]
) -> Report:
    report = Report()
    begun: Result | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            break
        match message:
            case Report():
                return message
            case AtlasError():
                raise message
            case Result(status="begun"):
                begun = message
            case Result():
                report.results.append(message)
                heard(message)
    child.join(_JOIN)
    how = "closed its connection and still runs" if child.exitcode is None else ending(child.exitcode)
    if begun is None:
        raise KernelError(f"the process of the trials {how}", "it had not begun a trial", "look at what it printed")
    failed = Result(begun.op, begun.implementation, begun.label, "failed", f"the process {how} while it ran")
    report.results.append(failed)
    heard(failed)
    report.lost = f"the process {how} at {failed.id}; what follows was not run"
    return report


def _run(work: Work, connection: Connection) -> None:
    try:
        work(connection.send)
    except AtlasError as error:
        connection.send(error)

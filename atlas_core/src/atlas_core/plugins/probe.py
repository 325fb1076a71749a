"""Ask a machine whether it is there, in a child process: a driver that crashes or hangs costs a reason, not the server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from atlas_core.plugins.load import load
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.verdict import Verdict

_MARK = "atlas-probe-verdict "


class Prober:
    """Runs probes and remembers their verdicts, since a machine does not change while a process runs."""

    def __init__(self, timeout: float = 20.0, environ: Mapping[str, str] | None = None) -> None:
        """``timeout`` is in seconds for each probe; ``environ`` is the child's environment (None: inherited)."""
        self._timeout = timeout
        self._environ = environ
        self._verdicts: dict[str, Verdict] = {}

    def probe(self, target: str, dist: str) -> Verdict:
        """The verdict of the callable behind ``target`` (``module:attr``), which ``dist`` declares.

        Never raises for the probe's sake: an exception, a crash, a wrong answer and a hang all are refusals with their reason.
        """
        if target not in self._verdicts:
            self._verdicts[target] = self._run(target, dist)
        return self._verdicts[target]

    def _run(self, target: str, dist: str) -> Verdict:
        # -P: a plugin's folder in the working directory must not shadow an installed package.
        command = [sys.executable, "-P", "-m", "atlas_core.plugins.probe", target, dist]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="backslashreplace", start_new_session=True, env=self._environ,
        )  # fmt: skip
        try:
            out, err = child.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            # The whole group, for a probe's own children would keep the pipes open.
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Verdict.no(f"the probe {target} did not answer within {self._timeout:g} s")
        answers = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
        if child.returncode == 0 and answers:
            answer = json.loads(answers[-1])
            return Verdict(answer["ok"], tuple(answer["reasons"]), answer["rank"])
        last = err.strip().splitlines()[-1:] or ["it said nothing"]
        return Verdict.no(f"the probe {target} {ending(child.returncode)}: {last[0]}")


def ending(code: int) -> str:
    """How a child process ended, by its exit code: a predicate for a sentence."""
    if code >= 0:
        return f"ended without an answer (exit status {code})"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def main(target: str, dist: str) -> None:
    """The child: run one probe and print its verdict."""
    try:
        verdict = load(target, dist)()
        if not isinstance(verdict, Verdict):
            verdict = Verdict.no(f"the probe {target} answered {verdict!r}, not a Verdict")
    except AtlasError as error:
        verdict = Verdict.no(": ".join(filter(None, (error.what, error.why))))
    except Exception as error:  # noqa: BLE001  whatever a driver raises is the reason why this machine cannot be used
        verdict = Verdict.no(f"the probe {target} failed: {type(error).__name__}: {error}")
    answer = json.dumps({"ok": verdict.ok, "reasons": verdict.reasons, "rank": verdict.rank})
    # A driver may have left a line unfinished on standard output.
    sys.stdout.write(f"\n{_MARK}{answer}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

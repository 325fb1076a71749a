"""Whether the machine is there. Atlas calls this in a child process, so a driver may crash or hang in it."""

from atlas_core.vocab.verdict import Verdict


def probe() -> Verdict:
    """Always there, and below the CPU's rank of -100: the toy is served only when it is asked for."""
    return Verdict.yes(-200, "the CPU under another name")

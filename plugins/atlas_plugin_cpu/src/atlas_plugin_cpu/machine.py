"""Which processors this host offers a process, and what they can do."""

import os
import platform
from pathlib import Path

from atlas_core.runtime.host import read
from atlas_core.vocab.verdict import Verdict
from atlas_plugin_cpu.archs import ARCHS, NATIVE

_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_NATIVE_SCORE = 100


def quota(cpu_max: str) -> float | None:
    """Processors that a cgroup's ``cpu.max`` (``<quota> <period>``) allows; None without a limit."""
    words = cpu_max.split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def usable_processors() -> int:
    """Processors that this process may use: its affinity, capped by the control group's quota, at least one."""
    count = len(os.sched_getaffinity(0))
    allowed = quota(read(_CGROUP / "cpu.max"))
    return count if allowed is None else max(1, min(count, int(allowed)))


def _cpuinfo(wanted: str) -> str:
    """The first value of a key of /proc/cpuinfo; empty when there is none."""
    for line in read(_CPUINFO).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == wanted:
            return value.strip()
    return ""


def processor_name() -> str:
    """The processor's own name, else the architecture."""
    return _cpuinfo("model name") or platform.machine()


def missing_features(arch: str) -> tuple[str, ...]:
    """Instruction sets of ``arch`` that this processor lacks: running its kernels would end the process."""
    known = ARCHS.get(arch)
    if known is None:
        return ()
    if known.machine != platform.machine():
        return (known.machine,)
    return tuple(sorted(known.features - set((_cpuinfo("flags") or _cpuinfo("Features")).split())))


def runs(arch: str) -> Verdict:
    """Whether this processor runs kernels built for ``arch``, ranked by how much of it they use."""
    missing = missing_features(arch)
    if missing:
        return Verdict.no(f"{processor_name()} lacks {', '.join(missing)}")
    if arch.startswith(f"{NATIVE}-"):
        return Verdict.yes(_NATIVE_SCORE, "built on this very machine, or for one like it")
    known = ARCHS.get(arch)
    if known is None:
        return Verdict.no("this plugin does not know it")
    return Verdict.yes(known.score, f"{processor_name()} has all that it asks for")


def probe() -> Verdict:
    """Every Linux host has a CPU; the rank is the lowest, so that an accelerator is preferred where there is one."""
    if not hasattr(os, "sched_getaffinity"):
        return Verdict.no("this is not Linux, which the CPU backend needs")
    return Verdict.yes(-100, f"{processor_name()}, {usable_processors()} processors")

"""What this host offers a process: processors and memory, within the limits of its control group."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from atlas_core.vocab.verdict import Verdict
from atlas_plugin_cpu.archs import ARCHS, NATIVE

_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_NATIVE_SCORE = 100


def _read(path: Path) -> str:
    """The text of a file of the kernel; empty where this kernel has no such file."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def quota(cpu_max: str) -> float | None:
    """Processors that a cgroup's ``cpu.max`` (``<quota> <period>``) allows; None without a limit."""
    words = cpu_max.split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def usable_processors() -> int:
    """Processors that this process may use: its affinity, capped by the control group's quota, at least one."""
    count = len(os.sched_getaffinity(0))
    allowed = quota(_read(_CGROUP / "cpu.max"))
    return count if allowed is None else max(1, min(count, int(allowed)))


def meminfo(text: str) -> Mapping[str, int]:
    """The lines ``Name: <n> kB`` of /proc/meminfo, in bytes."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def memory() -> tuple[int, int]:
    """(available, total) bytes for this process. What the page cache could give back counts as available."""
    info = meminfo(_read(Path("/proc/meminfo")))
    available, total = info.get("MemAvailable", 0), info.get("MemTotal", 0)
    limit = _read(_CGROUP / "memory.max").strip()
    if limit.isdigit():
        used = int(_read(_CGROUP / "memory.current").strip() or 0)
        stat = dict(line.split() for line in _read(_CGROUP / "memory.stat").splitlines())
        held = used - int(stat.get("inactive_file", 0)) - int(stat.get("active_file", 0))
        total, available = min(total, int(limit)), min(available, int(limit) - held)
    return max(available, 0), total


def _cpuinfo(wanted: str) -> str:
    """The first value of a key of /proc/cpuinfo; empty when there is none."""
    for line in _read(_CPUINFO).splitlines():
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

"""What this host has to give to a process, within the limits of its control group."""

from collections.abc import Mapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def read(path: Path) -> str:
    """The text of a file of the kernel; empty where this kernel has no such file."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def memory() -> tuple[int, int]:
    """(available, total) bytes; zeros on systems that do not tell. What the page cache could give back counts as available."""
    info = _meminfo(read(Path("/proc/meminfo")))
    available, total = info.get("MemAvailable", 0), info.get("MemTotal", 0)
    limit = read(_CGROUP / "memory.max").strip()
    if limit.isdigit():
        used = int(read(_CGROUP / "memory.current").strip() or 0)
        stat = dict(line.split() for line in read(_CGROUP / "memory.stat").splitlines())
        held = used - int(stat.get("inactive_file", 0)) - int(stat.get("active_file", 0))
        total, available = min(total, int(limit)), min(available, int(limit) - held)
    return max(available, 0), total


def _meminfo(text: str) -> Mapping[str, int]:
    """The lines ``Name: <n> kB`` of /proc/meminfo, in bytes."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found

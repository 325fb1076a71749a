"""What the host has to give."""

from pathlib import Path


def available_memory() -> int | None:
    """Bytes that programs could still get, by the kernel's own estimate; None on systems without one."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)

"""What the kernel's files say about memory."""

from atlas_core.runtime import host


def test_memory_is_capped_by_the_control_group(monkeypatch):
    files = {
        "meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n",
        "memory.max": "512000\n",
        "memory.current": "300000\n",
        "memory.stat": "anon 5\ninactive_file 100000\nactive_file 50000\n",
    }
    monkeypatch.setattr(host, "read", lambda path: files.get(path.name, ""))
    assert host.memory() == (512000 - 150000, 512000)
    files["memory.max"] = "max\n"
    assert host.memory() == (800 * 1024, 1000 * 1024)
    files.clear()
    assert host.memory() == (0, 0)

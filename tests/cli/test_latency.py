"""What a person waits for at a prompt, interpreter included: seconds of the processor, since the machine may be busy."""

import os
import statistics
import subprocess
import sys

import pytest


def processor_seconds(*arguments):
    """User and system time of one ``atlas`` command."""
    command = [sys.executable, "-c", "import sys; from atlas_core.cli.main import main; sys.exit(main())", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "most"), [(("--help",), 0.3), (("plugins", "list"), 0.4)], ids=["help", "plugins"]
)
def test_small_commands_answer_at_once(arguments, most):
    processor_seconds(*arguments)  # warm
    assert statistics.median(processor_seconds(*arguments) for _ in range(5)) <= most

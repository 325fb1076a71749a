"""Starting a compiler, for the ComputeTargets of plugins."""

from collections.abc import Sequence

from atlas_core.vocab.errors import KernelError


def run_compiler(command: Sequence[str], what: str) -> str:
    """Run ``command`` and give its output and diagnostics together, as text.

    Raises KernelError with ``what`` and the compiler's own words when it fails or cannot be started.
    """
    import subprocess  # a start asks toolchains only what architectures mean

    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise KernelError(
            f"{what}: {command[0]} cannot be started", str(error), "Correct the path, or reinstall it."
        ) from error
    if done.returncode != 0:
        raise KernelError(
            f"{what}: {command[0]} ended with status {done.returncode}",
            done.stdout.strip(),
            f"Correct the source, or try it alone: {' '.join(command)}",
        )
    return done.stdout

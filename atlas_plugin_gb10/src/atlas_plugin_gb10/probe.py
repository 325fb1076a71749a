"""Whether a GB10 is here. Run by core in a child process, since a driver may hang or crash."""

from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.probe import RANK, probe_any

CAPABILITY = (12, 1)


def probe() -> Verdict:
    """Compute capability 12.1; a refusal says what there is instead, or why no GPU can be asked."""
    found = probe_any()
    if not found.ok:
        return found
    from atlas_nvidia.driver import devices

    gpus = devices()
    if any(gpu.capability == CAPABILITY for gpu in gpus):
        return Verdict.yes(RANK, *(f"{gpu.name} ({gpu.arch})" for gpu in gpus))
    names = ", ".join(f"{gpu.name} of compute capability {gpu.capability[0]}.{gpu.capability[1]}" for gpu in gpus)
    return Verdict.no(
        f"kernels are for compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and this machine has {names}"
    )

"""Whether a usable GPU is here. Run by core in a child process, since a driver may hang or crash."""

from atlas_core.vocab.errors import DeviceError
from atlas_core.vocab.verdict import Verdict

RANK = 100
"""Above any CPU."""


def probe_any() -> Verdict:
    """Any GPU. The hardware ``nvidia`` is abstract, so nothing is chosen by this answer."""
    return _probe(None)


def probe_sm90() -> Verdict:
    """H100, H200: compute capability 9.0."""
    return _probe((9, 0))


def _probe(wanted: tuple[int, int] | None) -> Verdict:
    try:
        from atlas_nvidia.driver import devices

        found = devices()
    except ImportError as error:
        return Verdict.no(f"cuda-bindings cannot be imported: {error}")
    except DeviceError as error:
        return Verdict.no(f"{error.what}: {error.why}")
    if not found:
        return Verdict.no("the driver sees no GPU")
    if wanted is None or any(device.capability == wanted for device in found):
        return Verdict.yes(RANK, *(f"{device.name} ({device.arch})" for device in found))
    names = ", ".join(
        f"{device.name} of compute capability {device.capability[0]}.{device.capability[1]}" for device in found
    )
    return Verdict.no(f"kernels are for compute capability {wanted[0]}.{wanted[1]}, and this machine has {names}")

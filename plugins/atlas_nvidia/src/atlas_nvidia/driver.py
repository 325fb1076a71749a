"""The CUDA driver's answers as values or DeviceErrors. Importing this needs cuda-bindings, calling it a driver."""

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda
from msgspec import Struct

from atlas_core.vocab.errors import DeviceError

_STICKY = frozenset({
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_CONTAINED", "CUDA_ERROR_TENSOR_LEAK",
})  # fmt: skip
"""Errors after which the context answers every call with the same error."""
_LOST = "restart the engine: this error leaves the context unusable"
_FULL = "end other programs on this GPU, or lower --memory: the driver needs room beside weights and caches"


def _word(answer: tuple[Any, bytes | None]) -> str:
    return answer[1].decode() if answer[1] else "unknown error"


def failure(status: Any, what: str) -> DeviceError:
    """A DeviceError in the driver's own words, for a status that is not success."""
    name = _word(cuda.cuGetErrorName(status))
    sticky = name in _STICKY
    cure = _LOST if sticky else _FULL if name == "CUDA_ERROR_OUT_OF_MEMORY" else ""
    return DeviceError(what, f"{name}: {_word(cuda.cuGetErrorString(status))}", cure, sticky=sticky)


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """The result of a driver call (None, one value, or a tuple of several). Raises DeviceError, ``what`` saying what was tried."""
    if answer[0] != cuda.CUresult.CUDA_SUCCESS:
        raise failure(answer[0], what)
    return answer[1] if len(answer) == 2 else answer[1:] or None


def initialise() -> None:
    """Load and start the driver; cheap when it is running. Raises DeviceError when there is none."""
    try:
        answer = cuda.cuInit(0)
    except RuntimeError as error:  # how cuda-bindings reports that libcuda is not there
        raise DeviceError(
            "There is no CUDA driver", str(error), "install the NVIDIA driver, or choose --hardware cpu"
        ) from error
    checked(answer, "The CUDA driver cannot be started")


class Device(Struct, frozen=True):
    """One GPU: what can be known without a context."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    handle: Any

    @property
    def arch(self) -> str:
        """The architecture-specific instruction set: sm_90a. Kernels are compiled for exactly this."""
        return f"sm_{self.capability[0]}{self.capability[1]}a"

    def attribute(self, name: str) -> int:
        """A device attribute by its name without CU_DEVICE_ATTRIBUTE_."""
        which = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(cuda.cuDeviceGetAttribute(which, self.handle), f"Asking {self.name} for {name}"))


def device(ordinal: int) -> Device:
    """One GPU by number. Raises DeviceError when there is no such."""
    initialise()
    handle = checked(cuda.cuDeviceGet(ordinal), f"There is no GPU {ordinal}")
    name = checked(cuda.cuDeviceGetName(256, handle), f"Asking GPU {ordinal} for its name")
    major, minor = (
        cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    capability = tuple(
        int(checked(cuda.cuDeviceGetAttribute(a, handle), f"Asking GPU {ordinal} for its kind")) for a in (major, minor)
    )
    return Device(ordinal, name.split(b"\0", 1)[0].decode(), (capability[0], capability[1]), handle)


def devices() -> tuple[Device, ...]:
    """Every GPU that the driver shows. Raises DeviceError when there is no driver."""
    initialise()
    return tuple(device(ordinal) for ordinal in range(checked(cuda.cuDeviceGetCount(), "Counting GPUs")))


def wake() -> Callable[[], None]:
    """Start the driver and make the first GPU's context, which takes a third of a second; what is returned lets go of it.

    Raises DeviceError when that cannot be done.
    """
    gpu = device(0)
    checked(cuda.cuDevicePrimaryCtxRetain(gpu.handle), f"Opening {gpu.name}")
    return lambda: checked(cuda.cuDevicePrimaryCtxRelease(gpu.handle), f"Letting go of {gpu.name}")

"""What the driver's failures become, with a driver that fails on demand. The enums and structures are cuda-bindings' own."""

from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as real

from atlas_core.kernels.library import CompiledKernel
from atlas_core.vocab.errors import BudgetError, DeviceError, KernelError
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, Param, f32, i32, ptr
from atlas_core.vocab.target import Target
from atlas_nvidia import backend as backend_module
from atlas_nvidia import driver as driver_module
from atlas_nvidia.backend import CudaBackend, open_backend

OK = real.CUresult.CUDA_SUCCESS
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 12, "COMPUTE_CAPABILITY_MINOR": 1, "MULTIPROCESSOR_COUNT": 48, "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024, "MAX_BLOCK_DIM_Y": 1024, "MAX_BLOCK_DIM_Z": 64, "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65535, "MAX_GRID_DIM_Z": 65535, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 101376,
}  # fmt: skip
PARAMS = (Param("ptr", "x", "const float"), Param("i32", "n"), Param("f32", "eps"))


class FakeDriver:
    """cuda.bindings.driver of a machine with one GB10. ``failures`` maps a function to the status that it answers.

    As the real one does, it answers every call with an error that has made the context unusable.
    """

    def __init__(self) -> None:
        self.failures: dict[str, Any] = {}
        self.lost: Any = None
        self.called: list[str] = []
        self._answers = {
            "cuDeviceGetCount": lambda: (1,),
            "cuDeviceGet": lambda ordinal: (ordinal,),
            "cuDeviceGetName": lambda length, device: (b"NVIDIA GB10\0",),
            "cuDeviceGetAttribute": self._attribute,
            "cuDevicePrimaryCtxRetain": lambda device: ("context",),
            "cuDriverGetVersion": lambda: (13010,),
            "cuMemGetInfo": lambda: (7 << 30, 128 << 30),
            "cuMemAlloc": lambda nbytes: (0x7F0000000000,),
            "cuModuleLoadData": lambda data: ("module",),
            "cuModuleGetFunction": lambda module, name: (17,),
            "cuFuncGetAttribute": lambda attribute, function: (1024 if "THREADS" in attribute.name else 0,),
            "cuStreamCreate": lambda flags: (real.CUstream(16),),
            "cuEventCreate": lambda flags: ("event",),
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        if name == "cuGetErrorName":
            return lambda status: (OK, status.name.encode())
        if name == "cuGetErrorString":
            return lambda status: (OK, b"in the driver's words")

        def call(*args: Any) -> tuple[Any, ...]:
            self.called.append(name)
            status = self.lost or self.failures.get(name, OK)
            if status is not OK:
                if status is real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS:
                    self.lost = status
                return (status, *(None for _ in range(1 if name in self._answers else 0)))
            return (OK, *self._answers.get(name, lambda *_: ())(*args))

        return call

    def _attribute(self, attribute: Any, device: Any) -> tuple[int]:
        return (ATTRIBUTES[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")],)


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(driver_module, "cuda", driver)
    monkeypatch.setattr(backend_module, "cuda", driver)
    return driver


@pytest.fixture
def library(tmp_path) -> Any:
    """One kernel, ``scale`` of ``toy``."""
    path = tmp_path / "toy.cubin"
    path.write_bytes(b"cubin")
    compiled = CompiledKernel("toy", "scale", path, "0" * 64, PARAMS, "toy", 32, 0, 0)
    return SimpleNamespace(target=Target("gb10", "sm_121a"), find=lambda module, entry: compiled)


@pytest.fixture
def gpu(fake, library) -> CudaBackend:
    return open_backend(library)


def launch(gpu: CudaBackend) -> Any:
    geometry = Geometry((48, 2, 1), (256, 1, 1), 90112)
    return gpu.prepare_launch(
        gpu.kernel("toy", "scale"), geometry, [ptr(0xABC0), i32(-3), f32(0.5)], LaunchAttrs(overlap=True)
    )


def test_a_failed_launch_names_kernel_geometry_and_arguments(fake, gpu):
    fake.failures["cuLaunchKernelEx"] = real.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(DeviceError) as caught:
        gpu.enqueue(launch(gpu), gpu.create_stream())
    what = "Launching scale of toy grid (48, 2, 1) block (256, 1, 1) shared 90112 (x=0xabc0, n=-3, eps=0.5)"
    assert caught.value.what == what
    assert caught.value.why == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: in the driver's words"
    assert not caught.value.sticky


def test_a_sticky_error_is_marked_wherever_it_surfaces(fake, gpu):
    prepared, stream, event = launch(gpu), gpu.create_stream(), gpu.create_event()
    gpu.enqueue(prepared, stream)
    fake.failures["cuEventSynchronize"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    attempts = (
        lambda: gpu.wait_event(event),  # where the kernel's fault is first heard of
        lambda: gpu.enqueue(prepared, stream),
        lambda: gpu.launch_graph("graph", stream),
        lambda: gpu.synchronize(stream),
        lambda: gpu.query_event(event),
        lambda: gpu.alloc(64),
    )
    for attempt in attempts:
        with pytest.raises(DeviceError) as caught:
            attempt()
        assert caught.value.sticky
        assert caught.value.why == "CUDA_ERROR_ILLEGAL_ADDRESS: in the driver's words"
        assert caught.value.cure == "restart the engine: this error leaves the context unusable"


def test_a_lost_device_can_still_be_closed(fake, gpu):
    gpu.alloc(64)
    fake.lost = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    gpu.close()
    assert fake.called[-2:] == ["cuMemFree", "cuDevicePrimaryCtxRelease"]
    before = len(fake.called)
    gpu.close()
    assert len(fake.called) == before


def test_memory_that_cannot_be_had_is_told_with_what_is_free(fake, gpu):
    fake.failures["cuMemAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(BudgetError) as caught:
        gpu.alloc(8 << 30)
    assert caught.value.what == f"{8 << 30} bytes of device memory cannot be had"
    assert caught.value.why == f"{7 << 30} of {128 << 30} bytes are free on NVIDIA GB10"


def test_a_launch_beyond_the_device_never_reaches_the_driver(fake, gpu):
    kernel = gpu.kernel("toy", "scale")
    with pytest.raises(KernelError, match="102400 bytes of shared memory, at most 101376"):
        gpu.prepare_launch(kernel, Geometry((1, 1, 1), (32, 1, 1), 102400), [ptr(0), i32(0), f32(0.0)])
    assert "cuLaunchKernelEx" not in fake.called


def test_a_device_that_cannot_be_opened_says_so(fake, library):
    fake.failures["cuDevicePrimaryCtxRetain"] = real.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
    with pytest.raises(DeviceError) as caught:
        open_backend(library)
    assert (caught.value.what, caught.value.sticky) == ("Opening NVIDIA GB10", False)


def test_kernels_of_another_architecture_are_refused(fake, library):
    library.target = Target("hopper", "sm_90a")
    with pytest.raises(KernelError) as caught:
        open_backend(library)
    assert caught.value.what == "NVIDIA GB10 runs sm_121a"
    assert "hopper" in caught.value.why

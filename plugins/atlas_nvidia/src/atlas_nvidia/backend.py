"""GpuBackend of one NVIDIA GPU, by the CUDA driver interface. Kernels are cubins of this exact architecture, never PTX."""

import ctypes
import operator
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from atlas_core.contracts.backend import Capabilities, DeviceFacts, GpuBackend, HostRing, Launch, StepResults
from atlas_core.kernels.library import KernelLibrary
from atlas_core.vocab.errors import BudgetError, DeviceError, KernelError, UsageError
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, TensorMap, i32, ptr
from atlas_nvidia.driver import Device, checked, device, failure
from atlas_nvidia.launch import (
    CudaKernel,
    CudaLaunch,
    Limits,
    PackedArguments,
    check_arguments,
    check_geometry,
    check_residency,
)

_PORTABLE_CLUSTER, _WIDEST_CLUSTER = 8, {"sm_90a": 16}
"""Blocks of a cluster that every device has room for, and those of some (CUDA programming guide, thread block clusters)."""
_ALL_SHARED = 100
"""Per cent of a processor's L1 memory that serve as shared memory: as many as the device allows."""
_ONE_BLOCK = Geometry((1, 1, 1), (256, 1, 1))
_DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory that a function may use without being told (CUDA programming guide, compute capabilities)."""


def open_backend(library: KernelLibrary, ordinal: int = 0, *, threads: int | None = None) -> GpuBackend:
    """The backend of GPU ``ordinal``, with the kernels of ``library``.

    Raises DeviceError without driver or GPU, KernelError when the library is for another architecture, UsageError for
    ``threads``, which only CPUs have.
    """
    if threads is not None:
        raise UsageError(
            "--threads is given", "kernels of a GPU choose their own", "leave it out, or choose --hardware cpu"
        )
    return CudaBackend(library, device(ordinal))


def _address(memory: memoryview | bytes) -> tuple[int, int]:
    """Address and length in bytes of contiguous host memory."""
    array = np.frombuffer(memory, np.uint8)
    return int(array.ctypes.data), array.nbytes


class CudaBackend:
    """See contracts.backend.GpuBackend and HostLink. Uses the device's primary context; streams do not wait for the default stream."""

    capabilities = Capabilities(
        asynchronous=True,
        bucketed=True,
        unified_memory=False,
        event_timing=True,
        host_link=True,
    )

    def __init__(self, library: KernelLibrary, gpu: Device) -> None:
        if library.target.arch != gpu.arch:
            raise KernelError(
                f"{gpu.name} runs {gpu.arch}", f"the kernels are for {library.target}",
                f"choose the hardware plugin of {gpu.arch}",
            )  # fmt: skip
        self._library = library
        self._gpu = gpu
        self._closed = False
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], CudaKernel] = {}
        self._shared: dict[int, int] = {}
        self._allocated: set[int] = set()
        self._pinned: set[int] = set()
        self._context = checked(cuda.cuDevicePrimaryCtxRetain(gpu.handle), f"Opening {gpu.name}")
        self.bind_to_thread()
        self._limits = Limits(
            gpu.attribute("MAX_THREADS_PER_BLOCK"),
            (gpu.attribute("MAX_BLOCK_DIM_X"), gpu.attribute("MAX_BLOCK_DIM_Y"), gpu.attribute("MAX_BLOCK_DIM_Z")),
            (gpu.attribute("MAX_GRID_DIM_X"), gpu.attribute("MAX_GRID_DIM_Y"), gpu.attribute("MAX_GRID_DIM_Z")),
            gpu.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            _WIDEST_CLUSTER.get(gpu.arch, _PORTABLE_CLUSTER),
        )
        self._facts = DeviceFacts(
            gpu.name, gpu.arch, self.memory()[1], gpu.attribute("MULTIPROCESSOR_COUNT"), _driver_version()
        )

    def facts(self) -> DeviceFacts:
        """See GpuBackend."""
        return self._facts

    def bind_to_thread(self) -> None:
        """See GpuBackend."""
        checked(cuda.cuCtxSetCurrent(self._context), f"Binding {self._gpu.name} to a thread")

    # Memory

    def alloc(self, nbytes: int) -> int:
        """See GpuBackend."""
        status, address = cuda.cuMemAlloc(max(nbytes, 1))
        if status == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.memory()
            raise BudgetError(
                f"{nbytes} bytes of device memory cannot be had", f"{free} of {total} bytes are free on {self._gpu.name}",
                "end other programs on this GPU, or lower --memory",
            )  # fmt: skip
        address = int(checked((status, address), f"Allocating {nbytes} bytes"))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        """See GpuBackend. Raises DeviceError for an address that ``alloc`` did not give."""
        if address not in self._allocated:
            raise DeviceError(f"{address:#x} cannot be freed", "it is not allocated", "this is a fault of the caller")
        checked(cuda.cuMemFree(address), f"Freeing {address:#x}")
        self._allocated.remove(address)

    def alloc_pinned(self, nbytes: int) -> memoryview:
        """See GpuBackend."""
        address = int(checked(cuda.cuMemHostAlloc(max(nbytes, 1), 0), f"Page-locking {nbytes} bytes"))
        self._pinned.add(address)
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

    def free_pinned(self, memory: memoryview) -> None:
        """See GpuBackend. Raises DeviceError for memory that ``alloc_pinned`` did not give."""
        address = ctypes.addressof(memory.obj)  # type: ignore[arg-type]  # the array made in alloc_pinned
        if address not in self._pinned:
            raise DeviceError(
                f"{address:#x} cannot be freed", "it is no page-locked memory", "this is a fault of the caller"
            )
        checked(cuda.cuMemFreeHost(address), f"Freeing page-locked {address:#x}")
        self._pinned.remove(address)

    def memory(self) -> tuple[int, int]:
        """See GpuBackend."""
        free, total = checked(cuda.cuMemGetInfo(), f"Asking {self._gpu.name} for its memory")
        return int(free), int(total)

    def copy_h2d(self, source: memoryview | bytes, target: int) -> None:
        """See GpuBackend."""
        address, nbytes = _address(source)
        what = f"Copying {nbytes} bytes to {target:#x}"
        checked(cuda.cuMemcpyHtoD(target, address, nbytes), what)
        # From pageable memory the call returns when the bytes are staged, not when they have arrived.
        checked(cuda.cuStreamSynchronize(cuda.CUstream(0)), what)

    def copy_d2h(self, source: int, target: memoryview) -> None:
        """See GpuBackend."""
        address, nbytes = _address(target)
        checked(cuda.cuMemcpyDtoH(address, source, nbytes), f"Copying {nbytes} bytes from {source:#x}")

    def copy_h2d_async(self, source: memoryview, target: int, stream: Any) -> None:
        """See GpuBackend."""
        address, nbytes = _address(source)
        checked(cuda.cuMemcpyHtoDAsync(target, address, nbytes, stream), f"Copying {nbytes} bytes to {target:#x}")

    def copy_d2h_async(self, source: int, target: memoryview, stream: Any) -> None:
        """See GpuBackend."""
        address, nbytes = _address(target)
        checked(cuda.cuMemcpyDtoHAsync(address, source, nbytes, stream), f"Copying {nbytes} bytes from {source:#x}")

    def copy_d2d_async(self, source: int, target: int, nbytes: int, stream: Any) -> None:
        """See GpuBackend."""
        checked(
            cuda.cuMemcpyDtoDAsync(target, source, nbytes, stream),
            f"Copying {nbytes} bytes from {source:#x} to {target:#x}",
        )

    def memset_async(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        """See GpuBackend."""
        checked(cuda.cuMemsetD8Async(target, value, nbytes, stream), f"Setting {nbytes} bytes at {target:#x}")

    # Kernels

    def kernel(self, module: str, entry: str) -> CudaKernel:
        """See GpuBackend. A module is loaded once, an entry looked up once."""
        known = self._kernels.get((module, entry))
        if known is None:
            known = self._kernels[module, entry] = self._load(module, entry)
        return known

    def _load(self, module: str, entry: str) -> CudaKernel:
        compiled = self._library.find(module, entry)
        key = str(compiled.path)
        if key not in self._modules:
            self._modules[key] = checked(cuda.cuModuleLoadData(compiled.path.read_bytes()), f"Loading {compiled.path}")
        function = checked(
            cuda.cuModuleGetFunction(self._modules[key], entry.encode()), f"Finding {entry} in {compiled.path}"
        )
        what, attribute = f"Asking {entry} for its needs", cuda.CUfunction_attribute
        # One division of L1 and shared memory for all: a processor that must change it first runs empty, and kernels of
        # different needs could not overlap.
        carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        checked(cuda.cuFuncSetAttribute(function, carveout, _ALL_SHARED), f"Dividing the memory of {entry}")
        threads = checked(cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function), what)
        static = checked(cuda.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), what)
        return CudaKernel(function, compiled, int(threads), int(static))

    def prepare_launch(
        self, kernel: CudaKernel, geometry: Geometry, args: Sequence[Arg], attrs: LaunchAttrs | None = None
    ) -> CudaLaunch:
        """See GpuBackend."""
        attrs = attrs or LaunchAttrs()
        check_arguments(kernel.title, kernel.compiled.params, args)
        check_geometry(kernel.title, geometry, attrs, self._limits, kernel.threads, kernel.static_shared)
        self._allow_shared(kernel, geometry.shared)
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
        config.sharedMemBytes = geometry.shared
        config.attrs = _attributes(attrs)
        config.numAttrs = len(config.attrs)
        if attrs.cluster and prod(attrs.cluster) > _PORTABLE_CLUSTER:
            which = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            checked(cuda.cuFuncSetAttribute(kernel.function, which, 1), f"Allowing {kernel.title} wide clusters")
        if attrs.cluster and attrs.cooperative:
            clusters = int(
                checked(
                    cuda.cuOccupancyMaxActiveClusters(kernel.function, config), f"Asking for room for {kernel.title}"
                )
            )
            check_residency(kernel.title, geometry, attrs.cluster, clusters)
        return CudaLaunch(kernel, geometry, tuple(args), attrs, config, PackedArguments(args, _encode))

    def enqueue(self, launch: Launch, stream: Any) -> None:
        """See GpuBackend. Raises DeviceError for a launch that another backend prepared."""
        if not isinstance(launch, CudaLaunch):
            raise DeviceError(
                f"{launch.description} is no CUDA launch",
                "another backend prepared it",
                "this is a fault of the caller",
            )
        launch.config.hStream = stream
        (status,) = cuda.cuLaunchKernelEx(launch.config, launch.kernel.function, launch.packed.address, 0)
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise failure(status, f"Launching {launch.description}")

    def prepare_fetch(self, ring: HostRing, target: int, fixed: int) -> CudaLaunch:
        """See HostLink. Page-locked memory has one address on both sides."""
        args = (*_ring(ring), ptr(target), i32(fixed))
        return self.prepare_launch(self.kernel("link", "fetch"), _ONE_BLOCK, args)

    def prepare_deliver(self, ring: HostRing, results: StepResults) -> CudaLaunch:
        """See HostLink."""
        given = (ptr(a) for a in (results.counts, results.sampled, results.values, results.ids))
        args = (*given, *_ring(ring), i32(results.rows), i32(results.wide))
        return self.prepare_launch(self.kernel("link", "deliver"), _ONE_BLOCK, args, LaunchAttrs(overlap=True))

    def _allow_shared(self, kernel: CudaKernel, nbytes: int) -> None:
        """Raise the function's bound on dynamic shared memory when this launch needs more than any before."""
        key = int(kernel.function)
        if nbytes <= self._shared.get(key, _DEFAULT_SHARED - kernel.static_shared):
            return
        which = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(
            cuda.cuFuncSetAttribute(kernel.function, which, nbytes),
            f"Allowing {kernel.title} {nbytes} bytes of shared memory",
        )
        self._shared[key] = nbytes

    # Streams, events, graphs

    def create_stream(self) -> Any:
        """See GpuBackend."""
        return checked(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), "Creating a stream")

    def synchronize(self, stream: Any) -> None:
        """See GpuBackend."""
        checked(cuda.cuStreamSynchronize(stream), "Waiting for a stream")

    def create_event(self, *, timing: bool = False) -> Any:
        """See GpuBackend."""
        flags = cuda.CUevent_flags
        return checked(
            cuda.cuEventCreate(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING), "Creating an event"
        )

    def record_event(self, event: Any, stream: Any) -> None:
        """See GpuBackend."""
        checked(cuda.cuEventRecord(event, stream), "Recording an event")

    def wait_event(self, event: Any) -> None:
        """See GpuBackend."""
        checked(cuda.cuEventSynchronize(event), "Waiting for an event")

    def query_event(self, event: Any) -> bool:
        """See GpuBackend."""
        (status,) = cuda.cuEventQuery(event)
        if status == cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        checked((status,), "Asking for an event")
        return True

    def elapsed_us(self, start: Any, end: Any) -> float:
        """See GpuBackend."""
        return float(checked(cuda.cuEventElapsedTime(start, end), "Reading the time between two events")) * 1000.0

    def begin_capture(self, stream: Any) -> None:
        """See GpuBackend. Other threads may go on calling the driver meanwhile."""
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(cuda.cuStreamBeginCapture(stream, mode), "Beginning a capture")

    def end_capture(self, stream: Any) -> Any:
        """See GpuBackend."""
        graph = checked(cuda.cuStreamEndCapture(stream), "Ending a capture")
        try:
            executable = checked(cuda.cuGraphInstantiate(graph, 0), "Instantiating a graph")
        finally:
            checked(cuda.cuGraphDestroy(graph), "Giving a captured graph back")
        checked(cuda.cuGraphUpload(executable, stream), "Uploading a graph")
        return executable

    def is_capturing(self, stream: Any) -> bool:
        """See GpuBackend."""
        status = checked(cuda.cuStreamIsCapturing(stream), "Asking a stream whether it is captured")
        return bool(status != cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def launch_graph(self, graph: Any, stream: Any) -> None:
        """See GpuBackend."""
        (status,) = cuda.cuGraphLaunch(graph, stream)
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise failure(status, "Launching a graph")

    def destroy_graph(self, graph: Any) -> None:
        """See GpuBackend."""
        checked(cuda.cuGraphExecDestroy(graph), "Destroying a graph")

    def close(self) -> None:
        """See GpuBackend. Memory still allocated is given back; after a sticky error the driver does that by itself."""
        if self._closed:
            return
        self._closed = True
        cuda.cuCtxSetCurrent(self._context)
        # Answers are not looked at: after a sticky error all of these fail, and releasing the context frees everything.
        for address in self._allocated:
            cuda.cuMemFree(address)
        for address in self._pinned:
            cuda.cuMemFreeHost(address)
        for module in self._modules.values():
            cuda.cuModuleUnload(module)
        cuda.cuDevicePrimaryCtxRelease(self._gpu.handle)


def _ring(ring: HostRing) -> tuple[Arg, ...]:
    """Where the places lie, how many words apart, how many, and which is next."""
    address, _ = _address(ring.memory)
    return ptr(address), i32(ring.stride // 4), i32(ring.places), ptr(ring.turn)


def _encode(array: TensorMap) -> tuple[int, Any]:
    """The driver's tensor map and its address: elements as unsigned integers of their size, which zeros are too."""
    types, size = cuda.CUtensorMapDataType, array.itemsize
    kind = {
        1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16, 4: types.CU_TENSOR_MAP_DATA_TYPE_UINT32,
    }[size]  # fmt: skip
    extents, boxes = array.shape[::-1], array.box[::-1]  # the driver's order is innermost first
    strides = [size * n for n in accumulate(extents[:-1], operator.mul)]
    encoded = cuda.cuTensorMapEncodeTiled(
        kind, len(extents), array.address, [cuda.cuuint64_t(n) for n in extents], [cuda.cuuint64_t(n) for n in strides],
        [cuda.cuuint32_t(n) for n in boxes], [cuda.cuuint32_t(1)] * len(extents),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    made = checked(encoded, f"Describing {array} to the copy engine")
    return int(made.getPtr()), made


def _driver_version() -> str:
    version = int(checked(cuda.cuDriverGetVersion(), "Asking the driver for its version"))
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _attributes(attrs: LaunchAttrs) -> list[Any]:
    result = []
    kinds = cuda.CUlaunchAttributeID
    if attrs.overlap:
        item = cuda.CUlaunchAttribute()
        item.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        item.value.programmaticStreamSerializationAllowed = 1
        result.append(item)
    if attrs.cluster:
        item = cuda.CUlaunchAttribute()
        item.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        item.value.clusterDim.x, item.value.clusterDim.y, item.value.clusterDim.z = attrs.cluster
        result.append(item)
    if attrs.cooperative and not attrs.cluster:  # that clusters can all run at once has been checked
        item = cuda.CUlaunchAttribute()
        item.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        item.value.cooperative = 1
        result.append(item)
    return result

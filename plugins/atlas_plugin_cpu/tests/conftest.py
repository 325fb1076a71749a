"""Kernels of this machine, built once, and a bench that runs one op on poisoned buffers with sentinels around them."""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpNeed
from atlas_core.kernels.build import Builder, Selection, jobs
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.ops.arrays import by_layer, laid_out
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.target import Target
from atlas_plugin_cpu.backend import CpuBackend, open_backend
from atlas_plugin_cpu.cached import FastPagedAttention
from atlas_plugin_cpu.implementations import implementations
from atlas_plugin_cpu.toolchain import CpuComputeTarget

_GUARD = 256
_SENTINEL = 0xA5
_IMPLEMENTATIONS = {implementation.name.removeprefix("cpu."): implementation for implementation in implementations()}
_IMPLEMENTATIONS["fast_paged_attention"] = FastPagedAttention()  # a part of another
_DTYPES = {np.dtype(np.float32): DType.F32, np.dtype(np.int32): DType.I32, np.dtype(np.uint32): DType.U32}


@cache
def built(arch: str) -> KernelLibrary:
    """The kernels of one architecture; compiles only what is stale."""
    tree, places = scan([KernelRoot("atlas_plugin_cpu")])
    target = CpuComputeTarget()
    (job,) = jobs(tree, {"cpu": target}, Selection(hardware="cpu", archs=(arch,)))
    Builder(tree, places, {"cpu": target}, workers=os.cpu_count() or 1).build(job)
    return KernelLibrary(tree, places, Target("cpu", job.arch))


def runs_avx2() -> bool:
    """Whether this machine runs what is built for x86-64-v3."""
    return platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text("utf-8")


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    """The kernels of this machine's own instruction set."""
    return built("native")


@dataclass
class Weight:
    """A weight as a checkpoint stores it; ``values`` is what it means, in float32."""

    values: np.ndarray
    data: bytes
    layout: StorageLayout

    @classmethod
    def plain(cls, values: np.ndarray) -> "Weight":
        return cls(values, values.tobytes(), plain(DType.F32))


@dataclass
class Step:
    """The live counts, and which of them bounds each operand's first dimension; ``spare`` more rows fit in."""

    tokens: int = 0
    sequences: int = 0
    rows: int = 0
    updates: int = 0
    live: Mapping[str, str] = field(default_factory=dict)
    spare: int = 3
    max_query: int = 1


class Bench:
    """Runs ops on one backend. Every buffer is poisoned with NaN (or minus one) beyond what the op may read."""

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self._addresses: dict[int, int] = {}

    def buffer(self, nbytes: int) -> tuple[Buffer, np.ndarray]:
        """Memory with sentinels on both sides."""
        address = self.backend.alloc(nbytes + 2 * _GUARD)
        self._addresses[address] = nbytes + 2 * _GUARD
        whole = view(address, nbytes + 2 * _GUARD)
        whole[:] = _SENTINEL
        return Buffer(address + _GUARD, nbytes), whole[_GUARD : _GUARD + nbytes]

    def check(self) -> None:
        """Raise when a sentinel was overwritten; frees the buffers."""
        for address, size in self._addresses.items():
            whole = view(address, size)
            assert (whole[:_GUARD] == _SENTINEL).all()
            assert (whole[-_GUARD:] == _SENTINEL).all()
            self.backend.free(address)
        self._addresses.clear()

    def run(
        self,
        op: str,
        arrays: Mapping[str, Any],
        attrs: Mapping[str, Any],
        step: Step,
        outputs: Mapping[str, tuple[tuple[int, ...], Any]],
        again: Callable[[dict[str, np.ndarray]], None] | None = None,
        numerics: str = "exact",
    ) -> dict[str, np.ndarray]:
        """Capture and replay ``op``; gives the live part of every array afterwards.

        ``outputs`` maps names to (live shape, dtype). ``again`` may change memory between two replays.
        """
        implementation = _IMPLEMENTATIONS[op]
        specs, buffers, views, caches = {}, {}, {}, []
        shapes: dict[str, tuple[int, ...]] = {}
        for operand in PRIMITIVES[implementation.op].operands:
            name = operand.name
            if isinstance(arrays.get(name), Weight):
                weight = arrays[name]
                specs[name] = OperandSpec(weight.values.shape, weight.layout.scalar or DType.U8, weight.layout)
                continue
            shape, dtype = outputs[name] if name in outputs else (arrays[name].shape, arrays[name].dtype)
            shapes[name] = shape
            live = step.live.get(name, "")
            full = (shape[0] + step.spare, *shape[1:]) if live else shape
            page = (full[0], *full[2:]) if operand.kind == "cache" else full
            specs[name] = OperandSpec(page, _DTYPES[np.dtype(dtype)], live=live)
            buffers[name], raw = self.buffer(int(np.prod(full)) * 4)
            memory = raw.view(dtype).reshape(full)
            memory[...] = np.nan if np.issubdtype(dtype, np.floating) else 0xFFFFFFFF if dtype == np.uint32 else -1
            if name in arrays:
                memory[: shape[0]] = arrays[name]
            views[name] = memory
            caches += [name] if operand.kind == "cache" else []
        need = OpNeed(
            implementation.op, specs, attrs, "native", numerics, step.tokens + step.spare, step.sequences + step.spare,
            step.rows + step.spare, step.max_query,
        )  # fmt: skip
        verdict = implementation.supports(need)
        assert verdict.ok, verdict
        layouts = {name: implementation.kv_layouts(need)[0] for name in caches}
        for name, kv in layouts.items():
            views[name][...] = laid_out(views[name], kv)
        for name, packed in implementation.packings(need).items():
            weight = arrays[name]
            data = implementation.pack(packed.name, weight.layout, weight.values.shape, weight.data)
            buffers[name], raw = self.buffer(packed.nbytes)
            raw[:] = np.frombuffer(data, np.uint8)
        counts, raw = self.buffer(32)
        raw.view(np.int32)[:4] = step.tokens, step.sequences, step.rows, step.updates
        scratch, _ = self.buffer(implementation.scratch_bytes(need))
        context = BindContext(self.backend, buffers, counts.address, scratch, self.backend.facts().processors)
        stream = self.backend.create_stream()
        self.backend.begin_capture(stream)
        for launch in implementation.bind(need, context):
            self.backend.enqueue(launch, stream)
        graph = self.backend.end_capture(stream)
        self.backend.launch_graph(graph, stream)
        if again is not None:
            again(views)
            self.backend.launch_graph(graph, stream)
        self.backend.destroy_graph(graph)
        result = {
            name: (by_layer(memory, layouts[name]) if name in layouts else memory)[: shapes[name][0]].copy()
            for name, memory in views.items()
        }
        for name in outputs.keys() & step.live.keys():
            beyond = views[name][shapes[name][0] :]
            assert np.isnan(beyond).all() if np.issubdtype(beyond.dtype, np.floating) else (beyond == -1).all()
        self.check()
        return result


def view(address: int, nbytes: int) -> np.ndarray:
    """Memory as bytes."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


@pytest.fixture(scope="session", params=["native-1", "native-2", "x86-64-v3-2"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A bench with one and with two threads, and with the kernels of older processors."""
    arch, _, threads = request.param.rpartition("-")
    if arch != "native" and not runs_avx2():
        pytest.skip(f"needs an instruction set: {arch}")
    backend = open_backend(built(arch), threads=int(threads))
    yield Bench(backend)
    backend.close()


@pytest.fixture(scope="session")
def benches() -> Iterator[tuple[Bench, Bench]]:
    """One bench with this machine's own instructions, one with those of x86-64-v3."""
    if not runs_avx2():
        pytest.skip("needs an instruction set: x86-64-v3")
    opened = [open_backend(built(arch), threads=1) for arch in ("native", "x86-64-v3")]
    yield Bench(opened[0]), Bench(opened[1])
    for backend in opened:
        backend.close()


@pytest.fixture
def backend(library: KernelLibrary) -> Iterator[CpuBackend]:
    """A backend with three threads: possibly more than there are processors."""
    opened = open_backend(library, threads=3)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def make_weight() -> type[Weight]:
    """The class of weights."""
    return Weight


@pytest.fixture(scope="session")
def make_step() -> type[Step]:
    """The class of steps."""
    return Step

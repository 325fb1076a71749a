"""Products with FP8 and NVFP4 weights beside those with 16 bits, of the shapes of one layer: microseconds and shares of bandwidth.

    python bench/gpu/scaled_products.py [--tokens 1 8 64] [--bandwidth 4650] [--hardware hopper --arch sm_90a]

Each figure is the median of replays of a graph of many launches over different copies of the weight, more than caches hold, one behind
another as in a step. Codes are random bytes; what the kernels compute is conformance's to say.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from atlas_core.contracts.backend import GpuBackend, Launch
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpImplementation, OpNeed
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.ops.scaled import E4M3_TILE, NVFP4
from atlas_core.ops.step import COUNT_WORDS, Count
from atlas_core.runtime.capture import captured
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.target import Target
from atlas_nvidia import implementations as baseline
from atlas_nvidia.backend import open_backend
from atlas_plugin_hopper import implementations as hopper

LAYOUTS = {"bf16": plain(DType.BF16), "fp8": E4M3_TILE, "nvfp4": NVFP4}
SHAPES = {"o": (4096, 4096), "gate": (14336, 4096), "down": (4096, 14336), "head": (128256, 4096)}
"""Rows and summed elements of Llama 3.1 8B."""
ENOUGH = 400 << 20
"""Bytes of weights in a graph, several times what the L2 cache holds."""
IMPLEMENTATIONS = list({i.name: i for i in (*baseline.implementations(), *hopper.implementations())}.values())


def implementations(need: OpNeed) -> Iterator[tuple[int, OpImplementation]]:
    """Who takes it, best first."""
    asked = [
        (implementation.supports(need), implementation)
        for implementation in IMPLEMENTATIONS
        if implementation.op == need.op
    ]
    yield from sorted(((v.rank, i) for v, i in asked if v.ok), key=lambda each: -each[0])


class Bench:
    """One device."""

    def __init__(self, hardware: str, arch: str) -> None:
        tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
        self.backend: GpuBackend = open_backend(KernelLibrary(tree, places, Target(hardware, arch)))
        self.backend.bind_to_thread()
        self.arch, self.workers = arch, self.backend.facts().processors
        self.stream = self.backend.create_stream()
        self.room = 2 * ENOUGH
        self.weights = self.backend.alloc(self.room)
        noise = np.random.default_rng(0).integers(0, 128, 64 << 20, np.uint8) & 0xBF  # no NaN, nothing large
        for at in range(0, self.room, noise.nbytes):
            self.backend.copy_h2d(noise.data[: min(noise.nbytes, self.room - at)], self.weights + at)
        self.others = self.backend.alloc(2 << 30)
        self.counts = self.backend.alloc(4 * COUNT_WORDS)

    def need(self, op: str, rows: int, width: int, tokens: int, layout: StorageLayout) -> OpNeed:
        """``op`` on ``tokens``."""
        x = OperandSpec((tokens, width), DType.BF16, live="T")
        weight = OperandSpec((rows, width), layout.scalar or DType.U8, layout)
        wide = OperandSpec((tokens, rows), DType.F32, live="T")
        residual = {"residual": wide} if op == "linear_add" else {}
        y = wide if residual else OperandSpec((tokens, rows), DType.BF16, live="T")
        return OpNeed(
            op, {"x": x, "weight": weight, **residual, "y": y}, {}, self.arch, "fast", tokens, tokens, tokens,
            1 if tokens <= 64 else tokens, activation=DType.BF16, processors=self.workers,
        )  # fmt: skip

    def time(self, need: OpNeed, implementation: OpImplementation) -> tuple[float, int]:
        """Microseconds of one launch, and bytes of its weight."""
        spec = need.operands["weight"]
        packing = implementation.packings(need).get("weight")
        nbytes = packing.nbytes if packing else spec.layout.nbytes(spec.shape) if spec.layout else 0
        copies = max(1, min(16, ENOUGH // nbytes)) if need.tokens <= 64 else 2
        counts = np.zeros(COUNT_WORDS, np.int32)
        counts[[Count.TOKENS, Count.SEQUENCES, Count.ROWS]] = need.tokens
        self.backend.copy_h2d(counts.data.cast("B"), self.counts)
        apart, operands = self.others, {}
        for name, each in need.operands.items():
            if name != "weight":
                operands[name] = Buffer(apart, prod(each.shape) * each.dtype.itemsize)
                apart += -(-operands[name].nbytes // 4096) * 4096
        launches: list[Launch] = []
        for copy in range(copies):
            weight = Buffer(self.weights + copy * (-(-nbytes // 4096) * 4096), nbytes)
            context = BindContext(
                self.backend, {**operands, "weight": weight}, self.counts, Buffer(apart, 64 << 20), self.workers
            )
            launches += implementation.bind(need, context)
        graph = captured(self.backend, launches * 2, self.stream)
        start, end = self.backend.create_event(timing=True), self.backend.create_event(timing=True)
        found = []
        for _ in range(7):
            self.backend.record_event(start, self.stream)
            self.backend.launch_graph(graph, self.stream)
            self.backend.record_event(end, self.stream)
            self.backend.wait_event(end)
            found.append(self.backend.elapsed_us(start, end) / (2 * copies))
        self.backend.destroy_graph(graph)
        return statistics.median(found[1:]), nbytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each shape and number of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64, 512, 2048])
    parser.add_argument("--bandwidth", type=float, default=4650, help="of the device, GB/s")
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--all", action="store_true", help="every implementation, not the best alone")
    asked = parser.parse_args(arguments)
    bench = Bench(asked.hardware, asked.arch)
    for tokens in asked.tokens:
        for shape, (rows, width) in SHAPES.items():
            if shape == "head" and tokens > 64:
                continue
            parts = []
            for label, layout in LAYOUTS.items():
                need = bench.need("linear_add" if shape in ("o", "down") else "linear", rows, width, tokens, layout)
                for _, implementation in list(implementations(need))[: None if asked.all else 1]:
                    us, nbytes = bench.time(need, implementation)
                    rate = (
                        f"{nbytes / us / asked.bandwidth / 10:.0f} %" if tokens <= 64
                        else f"{2e-6 * rows * width * tokens / us:.0f} TFLOP/s"
                    )  # fmt: skip
                    parts.append(f"{label} {us:.2f} us {rate} ({implementation.name})")
            print(f"{tokens:5} tokens {shape:5} " + "; ".join(parts), flush=True)


if __name__ == "__main__":
    main()

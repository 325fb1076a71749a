"""Linear attention on one GPU, with the head sizes of Qwen3.5-35B-A3B: microseconds a node, and shares of bandwidth.

    python bench/gpu/linear_attention.py [--prompt 8192] [--bandwidth 4.3]

First a prompt is read by the chunked kernels and token by token, and a decode step runs fused and in pieces: results and states must
agree, and a figure without that is void. Nodes of several layers are replayed as one graph, so that states come from memory. Needs built
kernels; works from a checkout without installed plugins.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpNeed
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.ops.step import COUNT_WORDS, Count, SlotLayout, Word
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import plain
from atlas_core.vocab.target import Target
from atlas_nvidia.backend import open_backend
from atlas_nvidia.implementations import implementations

ARCH = "sm_90a"
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
CHANNELS, VALUES = (2 * KEY_HEADS + VALUE_HEADS) * DIM, VALUE_HEADS * DIM
BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
KINDS = {BF16: ml_dtypes.bfloat16, F32: np.float32, I32: np.int32}
STEPS = ("linear_attention_step",)
CHUNKED = ("gated_delta_rule_chunks",)
_OP_ATTRS = {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "key_dim": DIM, "value_dim": DIM, "scale": DIM**-0.5}


class Lab:
    """``batch`` sequences of ``tokens`` each at ``position``, with made-up inputs, and states of ``layers`` layers."""

    def __init__(self, backend: Any, batch: int, tokens: int, layers: int, position: int) -> None:
        self.backend, self.stream = backend, backend.create_stream()
        self.batch, self.tokens, self.layers = batch, batch * tokens, layers
        self.max_query = tokens
        rng = np.random.default_rng(0)
        slots = SlotLayout(batch, (1,), 1)
        self.stride = slots.stride
        words = np.zeros(slots.words, np.int32)
        for slot in range(batch):
            words[slots.word(slot, Word.POSITION)] = position
            words[slots.word(slot, Word.STATE_IN)] = words[slots.word(slot, Word.STATE_OUT)] = slot
        counts = np.zeros(COUNT_WORDS, np.int32)
        counts[[Count.TOKENS, Count.SEQUENCES, Count.ROWS]] = self.tokens, batch, batch
        t = self.tokens
        self.specs: dict[str, OperandSpec] = {}
        self.buffers: dict[str, Buffer] = {}
        self.values: dict[str, np.ndarray] = {}
        self.counts = self._put(counts)
        for name, array in {
            "qkv": rng.standard_normal((t, CHANNELS), np.float32), "a": rng.standard_normal((t, VALUE_HEADS), np.float32),
            "b": rng.standard_normal((t, VALUE_HEADS), np.float32), "gate": rng.standard_normal((t, VALUES), np.float32),
            "convolved": np.zeros((t, CHANNELS), np.float32), "unit": np.zeros((t, CHANNELS), np.float32),
            "attended": np.zeros((t, VALUES), np.float32), "y": np.zeros((t, VALUES), np.float32),
        }.items():  # fmt: skip
            self.add(name, array, BF16, live="T")
        self.add("cu_q", np.arange(batch + 1, dtype=np.int32) * tokens, I32, live="S+1")
        self.add("row_slot", np.arange(batch, dtype=np.int32), I32, live="S")
        self.add("slots", words, I32)
        self.add("filters", rng.standard_normal((CHANNELS, 4), np.float32) * 0.5, BF16, weight=True)
        self.add("a_log", np.log(rng.uniform(0.01, 8, VALUE_HEADS)).astype(np.float32), F32, weight=True)
        self.add("dt_bias", rng.standard_normal(VALUE_HEADS).astype(np.float32) - 3, F32, weight=True)
        self.add("norm_weight", 1 + rng.standard_normal(DIM).astype(np.float32) * 0.1, BF16, weight=True)
        self.add("conv_state", rng.standard_normal((layers, batch, 3, CHANNELS), np.float32), F32)
        self.add("state", rng.standard_normal((layers, batch, VALUE_HEADS, DIM, DIM), np.float32) * 0.1, F32)
        self.scratch = Buffer(0, 0)

    def add(self, name: str, array: np.ndarray, dtype: DType, *, live: str = "", weight: bool = False) -> None:
        """An operand with its first contents."""
        self.specs[name] = OperandSpec(array.shape, dtype, plain(dtype) if weight else None, live)
        self.values[name] = array.astype(KINDS[dtype])
        self.buffers[name] = Buffer(self._put(self.values[name]), self.values[name].nbytes)

    def _put(self, array: np.ndarray) -> int:
        address: int = self.backend.alloc(array.nbytes)
        self.backend.copy_h2d(array.tobytes(), address)
        return address

    def refill(self) -> None:
        """States as they were at first."""
        for name in ("conv_state", "state"):
            self.backend.copy_h2d(self.values[name].tobytes(), self.buffers[name].address)

    def read(self, name: str) -> np.ndarray:
        """An operand as it is now, float32."""
        spec = self.specs[name]
        data = bytearray(self.buffers[name].nbytes)
        self.backend.copy_d2h(self.buffers[name].address, memoryview(data))
        return np.frombuffer(data, KINDS[spec.dtype]).reshape(spec.shape).astype(np.float32)

    def launches(
        self, op: str, name: str, operands: Mapping[str, str], attrs: Mapping[str, Any], layer: int
    ) -> list[Any]:
        """Of the implementation ``name``; ``operands`` maps those of the op to those here."""
        implementation = next(i for i in implementations() if i.op == op and i.name == name)
        specs = {inner: self.specs[outer] for inner, outer in operands.items()}
        layers = {"layer": layer, "conv_layer": layer, "slot_stride": self.stride}
        need = OpNeed(
            op, specs, {**attrs, **layers}, ARCH, "fast", self.tokens, self.batch, self.batch, self.max_query
        )  # fmt: skip
        verdict = implementation.supports(need)
        if not verdict.ok:
            raise SystemExit(f"{name}: {verdict.reasons}")
        nbytes = implementation.scratch_bytes(need)
        if nbytes > self.scratch.nbytes:
            self.scratch = Buffer(self.backend.alloc(nbytes), nbytes)
        buffers = {inner: self.buffers[outer] for inner, outer in operands.items()}
        context = BindContext(self.backend, buffers, self.counts, self.scratch, self.backend.facts().processors)
        return list(implementation.bind(need, context))

    def conv(self, layer: int) -> list[Any]:
        """Convolution and lengths."""
        operands = {"x": "qkv", "weight": "filters", **_same(_ROWS), "state": "conv_state", "y": "unit"}
        attrs = {"heads": 2 * KEY_HEADS, "head_dim": DIM, "eps": 1e-6}
        return self.launches("conv_l2_norm", "conv_l2_norm", operands, attrs, layer)

    def delta(self, name: str, layer: int) -> list[Any]:
        """The rule by one of its implementations."""
        operands = {"qkv": "unit", **_same(("a", "b", "a_log", "dt_bias", *_ROWS, "state")), "y": "attended"}
        return self.launches("gated_delta_rule", name, operands, _OP_ATTRS, layer)

    def norm(self) -> list[Any]:
        """The gated norm."""
        operands = {"x": "attended", "gate": "gate", "weight": "norm_weight", "y": "y"}
        return self.launches("gated_rms_norm", "gated_rms_norm", operands, {"eps": 1e-6}, 0)

    def step(self, name: str, layer: int) -> list[Any]:
        """All of it in one launch."""
        names = (
            "qkv",
            "a",
            "b",
            "gate",
            "filters",
            "a_log",
            "dt_bias",
            "norm_weight",
            *_ROWS,
            "conv_state",
            "state",
            "y",
        )
        attrs = {**_OP_ATTRS, "unit_heads": 2 * KEY_HEADS, "l2_eps": 1e-6, "norm_eps": 1e-6}
        return self.launches("linear_attention_step", name, _same(names), attrs, layer)

    def run(self, launches: Iterable[Any]) -> None:
        """Once, and wait."""
        for launch in launches:
            self.backend.enqueue(launch, self.stream)
        self.backend.synchronize(self.stream)

    def timed(self, launches: Sequence[Any], times: int = 9) -> float:
        """Microseconds of a graph of them, the median of replays."""
        backend = self.backend
        backend.begin_capture(self.stream)
        for launch in launches:
            backend.enqueue(launch, self.stream)
        graph = backend.end_capture(self.stream)
        found: list[float] = []
        for _ in range(times + 2):
            start, end = backend.create_event(timing=True), backend.create_event(timing=True)
            backend.record_event(start, self.stream)
            backend.launch_graph(graph, self.stream)
            backend.record_event(end, self.stream)
            backend.wait_event(end)
            found.append(backend.elapsed_us(start, end))
        backend.destroy_graph(graph)
        return statistics.median(found[2:])

    def close(self) -> None:
        """Give the memory back."""
        for buffer in (*self.buffers.values(), self.scratch):
            if buffer.nbytes:
                self.backend.free(buffer.address)
        self.backend.free(self.counts)


_ROWS = ("cu_q", "row_slot", "slots")


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _differ(title: str, want: np.ndarray, got: np.ndarray) -> None:
    error = np.abs(want - got)
    place = np.unravel_index(int(error.argmax()), error.shape)
    scale = float(np.sqrt(np.mean(want * want)))
    print(f"  {title}: largest difference {error.max():.5f} at {tuple(map(int, place))}, mean {error.mean():.6f}, "
          f"root mean square {scale:.4f}")  # fmt: skip
    if not np.isfinite(got).all() or error.mean() > 0.01 * scale:
        raise SystemExit(f"{title}: not the same")


def check(backend: Any, prompt: int) -> None:
    """Chunks against tokens, and the fused step against its parts."""
    lab = Lab(backend, 2, prompt, 1, 100)
    print(f"two prompts of {prompt} tokens from position 100, in chunks and token by token")
    lab.run(lab.conv(0))
    lab.run(lab.delta("gated_delta_rule", 0))
    want, state = lab.read("attended"), lab.read("state")
    for name in CHUNKED:
        lab.refill()
        lab.run(lab.delta(name, 0))
        _differ(f"results, {name}", want, lab.read("attended"))
        _differ("states", state, lab.read("state"))
    lab.close()
    lab = Lab(backend, 5, 1, 1, 100)
    print("a decode step of five sequences, in one launch and in pieces")
    lab.run([*lab.conv(0), *lab.delta("gated_delta_rule", 0), *lab.norm()])
    want, state, conv = (lab.read(name) for name in ("y", "state", "conv_state"))
    for name in STEPS:
        lab.refill()
        lab.run(lab.step(name, 0))
        _differ(f"results, {name}", want, lab.read("y"))
        _differ("states", state, lab.read("state"))
        _differ("inputs", conv, lab.read("conv_state"))
    lab.close()


def decode(backend: Any, bandwidth: float) -> None:
    """The fused step by batch and slices."""
    print("decode, a node: microseconds, TB/s of states, share of bandwidth")
    for batch, layers in ((1, 60), (2, 60), (4, 40), (8, 24), (16, 24), (64, 12)):
        lab = Lab(backend, batch, 1, layers, 1000)
        nbytes = 2 * (prod(lab.specs["state"].shape) + prod(lab.specs["conv_state"].shape)) * 4 / layers
        for name in STEPS:
            us = lab.timed([launch for layer in range(layers) for launch in lab.step(name, layer)]) / layers
            rate = nbytes / us / 1e6
            print(f"  batch {batch:>3}, {name:<24} {us:8.2f} us  {rate:5.2f} TB/s  {100 * rate / bandwidth:5.1f} %")
        parts = [
            launch
            for layer in range(layers)
            for launch in (*lab.conv(layer), *lab.delta("gated_delta_rule", layer), *lab.norm())
        ]
        if batch in (1, 8, 64):
            print(f"  batch {batch:>3}, {'in pieces':<24} {lab.timed(parts) / layers:8.2f} us")
        lab.close()


def prefill(backend: Any, prompt: int) -> None:
    """The nodes of one prompt, and of the same tokens as several."""
    for batch in (1, 4):
        lab = Lab(backend, batch, prompt // batch, 1, 0)
        rows = {"convolution and lengths": lab.conv(0), "gated norm": lab.norm()}
        for name in CHUNKED:
            both = lab.delta(name, 0)
            rows |= {f"{name}: by chunk": both[:1], f"{name}: states": both[1:], name: both}
        print(f"prompts, {batch} x {prompt // batch}: microseconds")
        for title, launches in rows.items():
            print(f"  {title:<36} {lab.timed(launches):9.1f}")
        lab.close()


def main() -> None:
    """Parse, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that this machine can move")
    options = parser.parse_args()
    tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
    backend = open_backend(KernelLibrary(tree, places, Target("hopper", ARCH)))
    print(backend.facts())
    check(backend, 1500)
    decode(backend, options.bandwidth)
    prefill(backend, options.prompt)


if __name__ == "__main__":
    main()

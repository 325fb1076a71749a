"""A whole decode step of a Llama or Qwen model on one GPU, with made-up weights: tokens a second, and microseconds by node.

    python bench/gpu/decode_step.py CONFIG.json [--context 1024] [--batch 1] [--hardware hopper --arch sm_90a]

Sequences differ, so that they go to different experts; how many of a mixture a step reads is printed.

The step is recorded by the model plugin, planned, captured as two graphs and replayed as the engine does. Before it is timed, a prompt
is read twice, once by prefill steps and once token by token, and the logits must agree; with two sequences or more, so must those of a
step in which one decodes while another reads its prompt. A figure without that is void. What the weights are, and why, is
in made_up.py.
Needs built kernels; works from a checkout without installed plugins.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import made_up
import numpy as np
from floors import chosen_inside, report

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.engine.inputs import InputLayout
from atlas_core.engine.rings import Results, Rings
from atlas_core.engine.runner import Runner
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.model.arena import place
from atlas_core.model.builder import StepLayout, record
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Bucket, Choices, Context, PlannedSegment, Step, plan
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import SlotLayout, Word
from atlas_core.runtime.bound import StepMemory, bind_step
from atlas_core.runtime.loader import weight_copies
from atlas_core.scheduler.plan import StepPlan
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, LaunchAttrs, i32, ptr
from atlas_core.vocab.target import Target
from atlas_model_llama.loader import LlamaLoader
from atlas_model_qwen.loader import QwenLoader
from atlas_nvidia import implementations as baseline
from atlas_nvidia.backend import open_backend
from atlas_nvidia.fused import fused_ops
from atlas_plugin_hopper import implementations as hopper
from atlas_plugin_hopper.fused import fused_ops as fused_of_hopper

PAGE_TOKENS = 64
PROMPT = 200
PREFILL = 2048
CHUNK = 64
AGREE = 0.1
"""How far a prompt read in pieces may be from the same read token by token, on average, in deviations of its logits.

Rounding alone makes up to 0.055 in 40 layers of a hybrid mixture (docs/measured-facts.md). A state that is lost, or one that is
another sequence's, is worth 0.3 and more.
"""
_ROOTS = {"hopper": "atlas_plugin_hopper"}
IMPLEMENTATIONS = list({i.name: i for i in (*baseline.implementations(), *hopper.implementations())}.values())
"""What the machine inherits, and its own; a name that is taken replaces its elder, as the assembly has it."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """A frame within two stamps (runtime.bound.Frame)."""

    inner: Any
    first: Any
    last: Any

    def begin(self) -> Sequence[Any]:
        """See Frame."""
        return (self.first, *self.inner.begin())

    def end(self, activations: Mapping[str, Buffer], counts: int) -> Sequence[Any]:
        """See Frame."""
        return (*self.inner.end(activations, counts), self.last)


class Bench:
    """Plans, memory and captured steps of one model on one GPU."""

    def __init__(
        self, config: Mapping[str, Any], hardware: str, arch: str, batch: int, context: int, piece: int = PREFILL,
        stored: str = "bf16",
    ) -> None:  # fmt: skip
        tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot(_ROOTS[hardware])])
        self.backend = open_backend(KernelLibrary(tree, places, Target(hardware, arch)))
        self.batch, self.piece = batch, piece
        self._choices: dict[int, dict[str, Buffer]] = {}
        config = config.get("text_config", config)
        model_type = config["model_type"].removesuffix("_text")
        loader = LlamaLoader() if model_type == "llama" else QwenLoader(model_type)
        self.spec = loader.read_config({k: v for k, v in config.items() if not k.startswith("_")})
        blocks = -(-(context + 4096) // PAGE_TOKENS)
        self.slots = SlotLayout(batch, (blocks,), 64)
        layout = StepLayout(self.slots, PAGE_TOKENS, DType.BF16, batch)
        self.program = record(loader, self.spec, layout)
        weights = made_up.layouts(self.program.weights(), stored)
        patterns = [Pattern.of(fused, PRIMITIVES) for fused in (*fused_ops(), *fused_of_hopper())]
        context_ = Context(arch, "fast", DType.BF16, weights, IMPLEMENTATIONS, patterns)
        updates = blocks + 32
        self.decode = Bucket(batch, batch, batch, batch * updates, 1)
        self.prefill = Bucket(piece, batch, batch, batch * updates, piece)
        choices = Choices()
        self.plans = {bucket: plan(self.program, bucket, context_, choices) for bucket in (self.decode, self.prefill)}
        self.memory = self._allocate(choices, batch * blocks)
        self.stream = self.backend.create_stream()
        self.bound = []
        results = Results.of(value.name for value in self.program.results)
        states = {name: self.memory.values[name] for name in ("slots", "penalty", "mask")}
        self.memory_of = {bucket: self._memory_of(bucket) for bucket in self.plans}
        rings = Rings(self.backend, [*self.plans], states["mask"], self.spec.vocab_size)
        # Graphs without a frame are replayed at will; those of the runner count their steps.
        self.unframed = {}
        for bucket, segments in self.plans.items():
            placement, memory = place(self.program, segments, bucket), self.memory_of[bucket]
            frame = rings.frame(self._inputs, bucket, results)
            self.bound.append((bucket, bind_step(self.backend, segments, placement, memory, self.stream, frame)))
            self.unframed[bucket] = bind_step(self.backend, segments, placement, memory, self.stream)
        self.runner = Runner(
            self.backend, self.stream, self.bound, inputs=self._inputs, states=states, vocab_size=self.spec.vocab_size,
            results=results, rings=rings,
        )  # fmt: skip

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(2 * cache.layers * cache.kv_heads * cache.head_dim * 2 for cache in self.spec.caches)

    def idle(self, context: int, steps: int) -> tuple[float, float]:
        """Microseconds between the last node of a step and the first of the next, by the device's clock: median and 90th percentile."""
        at = self.backend.alloc(8 * (1 + 2 * (steps + 8)))
        self.backend.memset_async(at, 0, 8, self.stream)
        kernel = self.backend.kernel("measure", "stamp")
        stamps = [
            self.backend.prepare_launch(
                kernel, Geometry((1, 1, 1), (32, 1, 1)), [ptr(at), i32(what)], LaunchAttrs(overlap=what == 1)
            )
            for what in (0, 1)
        ]
        states = {name: self.memory.values[name] for name in ("slots", "penalty", "mask")}
        results = Results.of(value.name for value in self.program.results)
        rings = Rings(self.backend, [self.decode], states["mask"], self.spec.vocab_size)
        frame = Stamped(rings.frame(self._inputs, self.decode, results), stamps[0], stamps[1])
        placement = place(self.program, self.plans[self.decode], self.decode)
        bound = bind_step(
            self.backend, self.plans[self.decode], placement, self.memory_of[self.decode], self.stream, frame
        )
        runner = Runner(
            self.backend, self.stream, [(self.decode, bound)], inputs=self._inputs, states=states,
            vocab_size=self.spec.vocab_size, results=results, rings=rings,
        )  # fmt: skip
        self.pipelined(context, steps, runner)
        found = bytearray(8 * (1 + 2 * (steps + 2)))
        self.backend.copy_d2h(at, memoryview(found))
        times = np.frombuffer(found, np.int64)[1:].reshape(-1, 2)
        gaps = (times[2:, 0] - times[1:-1, 1]) / 1000
        runner.close()
        self.backend.free(at)
        return float(np.median(gaps)), float(np.percentile(gaps, 90))

    def _allocate(self, choices: Choices, pages: int) -> StepMemory:
        backend = self.backend

        def alloc(nbytes: int) -> Buffer:
            return Buffer(backend.alloc(nbytes), nbytes)

        placements = [place(self.program, segments, bucket) for bucket, segments in self.plans.items()]
        values = {}
        for node in self.program.nodes:
            for value in node.operands.values():
                if value.kind == "state" and value.name not in values:
                    shape = [int(extent) for extent in value.shape]
                    values[value.name] = alloc(prod(shape) * 4)
                    if value.name.startswith("state."):  # what a context would have left, for steps behind one
                        backend.memset_async(values[value.name].address, 0, prod(shape) * 4, backend.create_stream())
                if value.kind == "cache" and value.name not in values:
                    page = choices.caches[value.name].page_bytes(int(value.shape[2]), int(value.shape[4]))
                    values[value.name] = alloc(int(value.shape[0]) * pages * page)
        for name, array in self.program.constants.items():
            values[name] = alloc(array.nbytes)
            backend.copy_h2d(array.tobytes(), values[name].address)
        inputs = max(InputLayout(bucket).nbytes for bucket in self.plans)
        self._inputs = backend.alloc(inputs)
        weights = {
            (copy.weight, copy.packed.name): alloc(copy.packed.nbytes)
            for copy in weight_copies([segment for segments in self.plans.values() for segment in segments])
        }
        made_up.fill(backend, weights, {v.name: tuple(map(int, v.shape)) for v in self.program.weights()})
        return StepMemory(
            alloc(max(p.nbytes for p in placements)),
            alloc(max(1, *(p.scratch for p in placements))),
            0,
            values,
            weights,
        )

    def _memory_of(self, bucket: Bucket) -> StepMemory:
        inputs = InputLayout(bucket).buffers(self._inputs)
        m = self.memory
        return StepMemory(m.arena, m.scratch, inputs["counts"].address, {**m.values, **inputs}, m.weights)

    def reset(self, position: int) -> list[tuple[int, int]]:
        """Updates that put every slot at ``position``, greedy, with pages of its own."""
        blocks = self.slots.table_blocks[0]
        updates = []
        for slot in range(self.batch):
            updates += [
                (self.slots.word(slot, Word.POSITION), position),
                (self.slots.word(slot, Word.LAST_TOKEN), 7 + slot),
                (self.slots.word(slot, Word.STATE_IN), slot),
                (self.slots.word(slot, Word.STATE_OUT), slot),
            ]
            updates += [(self.slots.word(slot, Word.PENALTY_ROW), -1), (self.slots.word(slot, Word.LOGPROBS), -1)]
            updates += [(self.slots.block(slot, 0, index), slot * blocks + index) for index in range(blocks)]
        return updates

    def step(self, tokens: Sequence[Sequence[int]], updates: Sequence[tuple[int, int]] = ()) -> StepPlan:
        """One row a slot."""
        rows = tuple(range(len(tokens)))
        cu_q = tuple(int(n) for n in np.cumsum([0, *map(len, tokens)]))
        return StepPlan(
            (), rows, tuple(t for row in tokens for t in row), cu_q, tuple(end - 1 for end in cu_q[1:]), rows, tuple(updates), (),
            False,
        )  # fmt: skip

    def run(self, plan_: StepPlan, *, logits: bool = False, runner: Runner | None = None) -> Any:
        """Run one step; its sampled ids, or its logits."""
        runner = runner or self.runner
        ticket = runner.launch(plan_)
        result = runner.read_logits(ticket) if logits else None
        ids = runner.collect(ticket)
        return result if logits else ids

    def read(self, prompts: Sequence[Sequence[int]], *, at_once: int) -> np.ndarray:
        """Logits behind the prompts, of equal length, read ``at_once`` tokens a sequence and step, from position 0."""
        starts = range(0, len(prompts[0]), at_once)
        for start in starts[:-1]:
            self.run(self.step([p[start : start + at_once] for p in prompts], [] if start else self.reset(0)))
        updates = [] if len(starts) > 1 else self.reset(0)
        return np.array(self.run(self.step([p[starts[-1] :] for p in prompts], updates), logits=True))

    def agree(self) -> tuple[float, float]:
        """(largest, mean) difference of the logits behind a prompt read in pieces and token by token, in units of their deviation."""
        whole = self._prompts(min(PROMPT, self.piece // self.batch))
        return _difference(whole, self._prompts(1))

    def pieces(self) -> tuple[float, float]:
        """The same for a prompt read whole and in pieces of CHUNK tokens: the same kernels, and the same chunks of linear attention."""
        return _difference(self._prompts(PROMPT), self._prompts(CHUNK))

    def _prompts(self, at_once: int) -> np.ndarray:
        prompts = np.random.default_rng(2).integers(0, self.spec.vocab_size, (self.batch, PROMPT)).tolist()
        return self.read(prompts, at_once=at_once)

    def mixed(self) -> tuple[float, float]:
        """The same for one step in which slot 0 decodes and slot 1 reads a prompt, against each of them alone."""
        first, second = np.random.default_rng(3).integers(0, self.spec.vocab_size, (2, PROMPT)).tolist()
        alone = self.read([first], at_once=PROMPT), self.read([second], at_once=PROMPT)
        self.run(self.step([first[:-1]], self.reset(0)))
        return _difference(np.concatenate(alone), self.run(self.step([first[-1:], second]), logits=True))

    def pipelined(self, context: int, steps: int, runner: Runner | None = None) -> float:
        """Seconds a step as the engine runs them: one launched ahead, results delivered."""
        runner = runner or self.runner
        feedback = self.step([[-1]] * self.batch)
        self.run(self.step([[-1]] * self.batch, self.reset(context)), runner=runner)
        ticket = runner.launch(feedback)
        began = time.perf_counter()
        for _ in range(steps):
            following = runner.launch(feedback)
            runner.collect(ticket)
            ticket = following
        runner.collect(ticket)
        return (time.perf_counter() - began) / (steps + 1)

    def operands(self, step: Step, bucket: int) -> dict[str, Buffer]:
        """Where the operands of a step of the plan lie."""
        memory, activations = self._memory_of(self.bound[bucket][0]), self.bound[bucket][1].activations
        return {
            name: memory.weights[(value.name, step.packings[name].name)] if value.kind == "weight"
            else (activations if value.kind == "activation" else memory.values)[value.name]
            for name, value in step.node.operands.items()
        }  # fmt: skip

    def launches(self, step: Step, operands: Mapping[str, Buffer], bucket: int) -> Sequence[Any]:
        """What a step of the plan launches."""
        memory = self._memory_of(self.bound[bucket][0])
        workers, keep = self.backend.facts().processors, self.unframed[self.bound[bucket][0]].keep
        bound = BindContext(self.backend, operands, memory.counts, memory.scratch, workers, keep)
        return step.implementation.bind(step.need, bound)

    def bindings(self, context: int) -> Iterator[tuple[Step, Sequence[Any]]]:
        """Every step of the decode plan with launches of its own, every sequence being at ``context``."""
        self.run(self.step([[-1]] * self.batch, self.reset(context)))
        for segment in self.plans[self.decode]:
            for step in segment.steps:
                yield step, self.launches(step, self.operands(step, 0), 0)

    def of_ops(self, context: int, ops: Sequence[str]) -> float:
        """Microseconds of a graph of all decode nodes of these ops, in order; the median of its replays."""
        made = list(self.bindings(context))
        chain = [launch for step, launches in made if step.need.op in ops for launch in launches]
        # What lies where tokens and positions were is made anew before every replay.
        begin = self.captured(
            [launch for step, launches in made if step.need.op == "step_begin" for launch in launches]
        )
        graph = self.captured(chain)
        times = [self.timed(graph, behind=begin) for _ in range(12)]
        for each in (begin, graph):
            self.backend.destroy_graph(each)
        return statistics.median(times[2:])

    def experts(self, context: int) -> list[int]:
        """Distinct experts of each mixture in a decode step, run launch by launch."""
        self.run(self.step([[-1]] * self.batch, self.reset(context)))
        self.run(self.step([[-1]] * self.batch, self.reset(context)))
        counts = []
        for step in self.plans[self.decode][0].steps:
            operands = self.operands(step, 0)
            for launch in self.launches(step, operands, 0):
                self.backend.enqueue(launch, self.stream)
            if step.need.op in {"norm_route", "moe_route"}:
                self.backend.synchronize(self.stream)
                ids = np.empty(step.need.operands["experts"].shape, np.int32)
                self.backend.copy_d2h(operands["experts"].address, ids.data.cast("B"))
                counts.append(len(np.unique(ids)))
            counts += chosen_inside(step)
        self.backend.synchronize(self.stream)
        return counts

    def prompt(self, length: int) -> float:
        """Seconds until the logits behind one prompt of ``length`` tokens are there, read in the pieces that there is a plan for."""
        tokens = np.random.default_rng(6).integers(0, self.spec.vocab_size, length).tolist()
        self.read([tokens], at_once=self.piece)
        began = time.perf_counter()
        self.read([tokens], at_once=self.piece)
        return time.perf_counter() - began

    def by_node(self, context: int, bucket: int = 0) -> list[tuple[str, int, float]]:
        """(implementation, nodes, microseconds a node): all nodes of one kind as a graph, so weights come from memory.

        Experts are made up, distinct for each token. ``advance`` is left out: it would move the sequences past their pages.
        """
        if bucket == 0:
            self.run(self.step([[-1]] * self.batch, self.reset(context)))
        else:
            self.run(self.step([[5] * (self.piece // self.batch)] * self.batch, self.reset(0)))
        groups: dict[str, list[Any]] = {}
        for segment in self.plans[self.bound[bucket][0]]:
            for step in segment.steps:
                operands = self.operands(step, bucket)
                if step.need.op.startswith("moe_") and "gate" in operands:
                    operands |= self._chosen(step)
                extra = (
                    f" {'x'.join(map(str, step.need.operands['weight'].shape))}"
                    if step.need.op in ("linear", "linear_add")
                    else ""
                )
                made = self.launches(step, operands, bucket)
                for launch in made:
                    part = f" {launch.kernel.compiled.entry}" if len(made) > 1 else ""
                    groups.setdefault(step.implementation.name + extra + part, []).append(launch)
        graphs = {name: self.captured(launches) for name, launches in groups.items() if name != "advance"}
        rows = []
        for name, graph in graphs.items():
            # Nodes of one kind write where tokens and positions were, which others still want: they are made anew.
            times = [self.timed(graph, behind=graphs["step_begin"]) for _ in range(9)]
            rows.append((name, len(groups[name]), statistics.median(times[2:]) / len(groups[name])))
        for graph in graphs.values():
            self.backend.destroy_graph(graph)
        return rows

    def _chosen(self, step: Step) -> dict[str, Buffer]:
        """Random experts, distinct for each token, and equal weights: what lay there belongs to others by now."""
        tokens, top_k = step.need.operands["experts"].shape
        if tokens not in self._choices:
            rng = np.random.default_rng(4)
            count = step.need.operands["gate"].shape[0]
            experts = np.argsort(rng.random((tokens, count)), axis=1)[:, :top_k].astype(np.int32)
            weights = np.full((tokens, top_k), 1 / top_k, np.float32)
            self._choices[tokens] = {}
            for name, array in (("experts", experts), ("weights", weights)):
                self._choices[tokens][name] = Buffer(self.backend.alloc(array.nbytes), array.nbytes)
                self.backend.copy_h2d(array.tobytes(), self._choices[tokens][name].address)
        return self._choices[tokens]

    def close(self) -> None:
        """Give the device back, for the next one."""
        self.runner.close()
        for step in self.unframed.values():
            step.destroy()
        self.backend.close()

    def captured(self, launches: Sequence[Any]) -> Any:
        """A graph of these launches, one after another."""
        self.backend.begin_capture(self.stream)
        for launch in launches:
            self.backend.enqueue(launch, self.stream)
        return self.backend.end_capture(self.stream)

    def timed(self, graph: Any, behind: Any = None) -> float:
        """Microseconds of one replay of ``graph``, untimed ``behind`` another."""
        start, end = self.backend.create_event(timing=True), self.backend.create_event(timing=True)
        if behind is not None:
            self.backend.launch_graph(behind, self.stream)
        self.backend.record_event(start, self.stream)
        self.backend.launch_graph(graph, self.stream)
        self.backend.record_event(end, self.stream)
        self.backend.wait_event(end)
        return self.backend.elapsed_us(start, end)


def _difference(want: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    if not (np.isfinite(want).all() and np.isfinite(got).all() and want.std() > 0):
        raise SystemExit("logits are not finite, or all equal")
    error = np.abs(want - got) / want.std()
    return float(error.max()), float(error.mean())


def _nodes(segments: Sequence[PlannedSegment]) -> str:
    return ", ".join(f"{segment.name} {len(segment.steps)}" for segment in segments)


def main() -> None:
    """Parse, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hardware", default="hopper", choices=sorted(_ROOTS))
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--prompt", type=int, default=0, help="read a prompt of so many tokens as well")
    parser.add_argument("--piece", type=int, default=PREFILL, help="tokens of a prompt's step")
    parser.add_argument("--prefill-nodes", action="store_true", help="time the nodes of a prompt as well")
    parser.add_argument("--stored", default="bf16", choices=made_up.STORED, help="how matrices of layers are stored")
    options = parser.parse_args()
    began = time.perf_counter()
    bench = Bench(
        json.loads(options.config.read_text()),
        options.hardware,
        options.arch,
        options.batch,
        max(options.context, options.prompt),
        options.piece,
        options.stored,
    )
    weights = sum(buffer.nbytes for buffer in bench.memory.weights.values())
    print(
        f"{bench.backend.facts().name}: {weights / 1e9:.2f} GB of weights, ready in {time.perf_counter() - began:.1f} s"
    )
    print(f"nodes: decode {_nodes(bench.plans[bench.decode])}; prefill {_nodes(bench.plans[bench.prefill])}")
    gates = {"prompt in pieces, token by token": bench.agree}
    if options.batch * PROMPT <= options.piece:
        gates["prompt whole, in pieces"] = bench.pieces
    if options.batch > 1:
        gates["decode beside a prompt, each alone"] = bench.mixed
    for title, gate in gates.items():
        largest, mean = gate()
        print(f"{title}: logits differ by {largest:.4f} at most, {mean:.5f} on average (deviations)")
        if mean > AGREE:
            raise SystemExit("these are not the same logits: every figure would be void")
    seconds = bench.pipelined(options.context, options.steps)
    rate = options.batch / seconds
    print(f"decode, batch {options.batch}, context {options.context}: {seconds * 1e6:.0f} us a step, {rate:.1f} tok/s, "
          f"{weights / seconds / 1e12:.2f} TB/s of weights")  # fmt: skip
    distinct = bench.experts(options.context)
    if distinct:
        print(f"distinct experts a layer: {statistics.mean(distinct):.1f} (mean), {min(distinct)} to {max(distinct)}")
    decode, prefill = bench.unframed[bench.decode], bench.unframed[bench.prefill]
    bench.run(bench.step([[-1]] * bench.batch, bench.reset(options.context)))
    for name in decode.graphs:
        print(f"graph {name}: {statistics.median(bench.timed(decode.graphs[name]) for _ in range(20)):.1f} us")
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, bench.spec.vocab_size, (options.batch, bench.piece // options.batch)).tolist()
    bench.run(bench.step(prompt, bench.reset(0)))
    print(f"prefill of {bench.piece} tokens: {bench.timed(prefill.graphs['forward']) / 1000:.2f} ms")
    if options.prompt:
        print(f"prompt of {options.prompt} tokens: {bench.prompt(options.prompt) * 1000:.1f} ms")
    for index, kind in enumerate(("decode", "prefill")):
        if kind == "decode" or options.prefill_nodes:
            print(f"{kind}, by node:")
            rows = bench.by_node(options.context, index)
            for name, count, us in rows:
                print(f"  {name:<60} {count:>4} launches {us:9.2f} us each {count * us:10.1f} us")
            if kind == "decode":
                report(rows, bench.plans[bench.decode], distinct)


if __name__ == "__main__":
    main()

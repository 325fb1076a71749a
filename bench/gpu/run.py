"""Decode speed of one GPU in one command: what the machine can do, whether the numbers are right, then the rows.

    python bench/gpu/run.py LLAMA.json SMOLLM2.json [--out FILE.json] [--vllm SCRIPT [--vllm-path SITE]]

The configurations are config.json files of Llama-3.1-8B and SmolLM2-135M (or models of their shapes); weights are made up. Every row is shown
beside its limit: the time in which the bytes that it must read arrive at the speed of a plain stream of reads, measured first in the
same run. Rows of a model whose logits are not right are void, and the command then exits 1. A context is the mean over the steps that are
timed. ``--vllm`` runs a peer at the same contexts behind the rows (peers.py) and shows Atlas' speed as a multiple of its.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ceilings import Ceilings, measure
from decode_step import Bench
from peers import PREFILL, decoded, prompts, vllm

HARDWARE, ARCH = "hopper", "sm_90a"
LAYERS = 4
"""Of the checks that need no whole model."""
BATCHES = (1, 8, 64)
CONTEXT = 1024
BESIDE = {8: (1.1, 1.25), 64: (0.9, 1.05)}
"""Least and wanted multiple of vLLM's speed, by batch."""
PIECES = 0.03
"""How far a prompt read in pieces may be from the same read token by token, on average, in deviations of its logits."""


@dataclass(frozen=True, slots=True)
class Row:
    """``limit`` is what ``value`` would be at the measured ceilings; ``least`` and ``towards`` are goals; ``more`` says whether more is better."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    least: float | None = None
    towards: float | None = None
    more: bool = True

    @property
    def share(self) -> float | None:
        """Of the limit."""
        if self.limit is None:
            return None
        return self.value / self.limit if self.more else self.limit / self.value

    @property
    def reached(self) -> bool | None:
        """Whether the least that is wanted is there."""
        if self.least is None:
            return None
        return self.value >= self.least if self.more else self.value <= self.least


class Runs:
    """The rows of one run, and its gates."""

    def __init__(self, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        self.rows: list[Row] = []
        self.gates: dict[str, Mapping[str, float]] = {}
        self.held = True

    def gate(self, name: str, found: Mapping[str, float], held: bool) -> None:
        """Note what a gate found; a broken one makes the rows void."""
        self.gates[name] = found
        self.held &= held
        print(
            f"gate {name}: {', '.join(f'{k} {v:.5g}' for k, v in found.items())}: {'held' if held else 'BROKEN'}",
            flush=True,
        )

    def add(self, row: Row) -> None:
        """Note and show a row."""
        self.rows.append(row)
        share = f"{row.share:6.1%}" if row.share is not None else "      "
        goal = (
            ""
            if row.least is None
            else f"  wanted {row.least:g}{'' if row.towards is None else f' to {row.towards:g}'}"
        )
        print(
            f"{row.name:<58} {row.value:10.2f} {row.unit:<6} {share}{goal}{'' if row.reached is not False else '  MISSED'}",
            flush=True,
        )

    def share(self, name: str, nbytes: float, microseconds: float, least: float, towards: float) -> None:
        """A row whose value is the share of the speed at which plain reads arrive."""
        self.add(Row(name, nbytes / microseconds * 1e6 / self.ceilings.read * 100, "%", 100.0, least, towards))

    def decode(
        self, bench: Bench, name: str, context: int, goals: tuple[float | None, float | None], steps: int = 200
    ) -> None:
        """Tokens a second of whole steps, and what lies between them."""
        pieces = bench.agree()
        self.gate(f"{name}, in pieces and token by token", {"mean": pieces[1], "max": pieces[0]}, pieces[1] <= PIECES)
        rate = bench.batch / bench.pipelined(context - steps // 2, steps)
        nbytes = sum(
            b.nbytes for key, b in bench.memory.weights.items() if key[0] != "embed" or bench.spec.tied_embeddings
        )
        nbytes += bench.batch * context * bench.token_bytes
        self.add(Row(f"{name}, context {context}", rate, "tok/s", bench.batch * self.ceilings.read / nbytes, *goals))
        median, high = bench.idle(context, 100)
        step = bench.batch / rate * 1e6
        allowed = max(8.0, 0.02 * step)
        self.add(
            Row(
                f"{name}, idle between steps (90th percentile {high:.1f})", median, "us", None, allowed, 5.0, more=False
            )
        )

    def prompt(self, bench: Bench, length: int) -> None:
        """Milliseconds until the logits behind one prompt are there."""
        self.add(Row(prompt_name(length), bench.prompt(length) * 1000, "ms", more=False))

    def beside(self, peer: Mapping[str, Any]) -> None:
        """The rows that vLLM was asked for too, as multiples of its speed."""
        found = {row.name: row.value for row in self.rows}
        for batch, rate in decoded(peer).items():
            name = decode_name(batch)
            ours = found[f"{name}, context {CONTEXT}"]
            self.add(Row(f"{name}, beside vLLM's {rate:,.0f} tok/s", ours / rate, "x", None, *BESIDE.get(batch, ())))
        for length, milliseconds in prompts(peer).items():
            name = prompt_name(length)
            self.add(Row(f"{name}, beside vLLM's {milliseconds:.1f} ms", milliseconds / found[name], "x"))


def decode_name(batch: int) -> str:
    """Of the rows of one batch."""
    return f"Llama-8B bf16, batch {batch}"


def prompt_name(length: int) -> str:
    """Of the row of one prompt."""
    return f"Llama-8B bf16, prompt of {length}"


def layer_chain(bench: Bench, context: int) -> tuple[float, float]:
    """(bytes, microseconds) of the products of one layer, from a graph of those of all layers in order."""
    wanted = ("norm_qkv_rope_append", "norm_gate_up_silu", "linear_add")
    nbytes = sum(
        2 * int(np.prod(step.need.operands[name].shape))
        for step in bench.plans[bench.decode][0].steps
        for name, value in step.node.operands.items()
        if step.need.op in wanted and value.kind == "weight"
    )
    return nbytes / bench.spec.layers, bench.of_ops(context, wanted) / bench.spec.layers


def attention(bench: Bench, context: int) -> tuple[float, float]:
    """(bytes, microseconds) of attention in one layer, from a graph of that of all layers."""
    nbytes = bench.batch * context * bench.token_bytes
    return nbytes / bench.spec.layers, bench.of_ops(context, ("paged_attention",)) / bench.spec.layers


def against_torch(config: Path, runs: Runs) -> None:
    """The gate of a few layers of real dimensions against float32 (against_torch.py), in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("against_torch.py")), str(config), "--layers", str(LAYERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, end="" if done.returncode == 0 else f"{done.stderr[-2000:]}\n")
    runs.gate(f"{LAYERS} layers against float32", {"status": done.returncode}, done.returncode == 0)


def opened(config: Mapping[str, Any], batch: int, context: int, use: Callable[[Bench], None]) -> None:
    """A bench for as long as ``use`` wants it."""
    bench = Bench(config, HARDWARE, ARCH, batch, context)
    try:
        use(bench)
    finally:
        bench.close()


def measure_all(llama: Mapping[str, Any], smollm2: Mapping[str, Any], runs: Runs) -> None:
    """Every row."""
    goals = dict(zip(BATCHES, ((255, 280), (1741, 1979), (9570, 11160)), strict=True))

    def row(bench: Bench) -> None:
        if bench.batch == 1:
            runs.share("products of one Llama-8B layer, in a graph", *layer_chain(bench, CONTEXT), 88, 93)
        runs.decode(bench, decode_name(bench.batch), CONTEXT, goals[bench.batch])

    def all_prompts(bench: Bench) -> None:
        for length in PREFILL:
            runs.prompt(bench, length)

    for batch in BATCHES:
        opened(llama, batch, CONTEXT, row)
    opened(llama, 1, max(PREFILL), all_prompts)
    opened(smollm2, 1, 256, lambda bench: runs.decode(bench, "SmolLM2-135M bf16, batch 1", 256, (4000, 6000), 400))

    def long_attention(context: int, bench: Bench) -> None:
        runs.share(f"paged decode attention, {bench.batch} of {context}", *attention(bench, context), 78, 88)

    for batch, context in ((64, 2048), (1, 32768)):
        opened({**llama, "num_hidden_layers": LAYERS}, batch, context, partial(long_attention, context))


def main() -> int:
    """Measure, print, write; the exit status tells whether the gates held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vllm", type=Path, help="a bench script of vLLM to run beside (see peers.py)")
    parser.add_argument("--vllm-path", type=Path, help="the folder of vLLM's packages")
    asked = parser.parse_args()
    llama, smollm2 = (json.loads(path.read_text()) for path in (asked.llama, asked.smollm2))
    first = Bench(smollm2, HARDWARE, ARCH, 1, 256)
    runs, device = Runs(measure(first.backend)), first.backend.facts()
    first.close()
    print(f"{device.name}, {device.driver}: reads {runs.ceilings.read / 1e12:.2f} TB/s; a node {runs.ceilings.node:.2f} us, "
          f"started early {runs.ceilings.early_node:.2f} us")  # fmt: skip
    against_torch(asked.llama, runs)
    measure_all(llama, smollm2, runs)
    peer = vllm(asked.vllm, llama, BATCHES, CONTEXT, asked.vllm_path) if asked.vllm else None
    if peer is not None:
        runs.beside(peer)
        print(f"vLLM: {json.dumps(peer)}")
    if asked.out:
        rows = [{**asdict(row), "share": row.share, "reached": row.reached} for row in runs.rows]
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device.name, "driver": device.driver,
            "ceilings": asdict(runs.ceilings), "gates": runs.gates, "held": runs.held, "rows": rows, "vllm": peer,
        }  # fmt: skip
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    if not runs.held:
        print("a gate is broken: the rows are void")
    return 0 if runs.held else 1


if __name__ == "__main__":
    sys.exit(main())

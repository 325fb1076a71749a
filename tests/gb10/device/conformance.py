"""The kernels of gb10 on the GPU of this machine: python conformance.py [--workers N] [FILTER].

On a GB10 this is the machine's own proof. On an H100 or H200 the same tree, compiled for sm_90a, runs with twins in place of the
instructions that Hopper lacks: everything but those is proved there. Each implementation is tried in a process of its own, so that
one that takes its process down is named and costs no other. Compiles what is stale, so it needs nvcc, or binaries of the same
sources in place, which --build ARCH makes anywhere. Exits with 1 unless everything passed and every implementation was tried.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from atlas_core.conformance.run import Options, Subject, test
from atlas_core.contracts.backend import GpuBackend
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import OpImplementation
from atlas_core.kernels.build import Builder, Job
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.kernels.tree import COMMON
from atlas_core.vocab.kernel import Arg, Geometry, i64, ptr
from atlas_core.vocab.target import Target
from atlas_nvidia import implementations as baseline
from atlas_nvidia.backend import open_backend
from atlas_nvidia.driver import device
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.implementations.base import ELEMENTS
from atlas_nvidia.toolchain import NvidiaComputeTarget
from atlas_plugin_gb10 import implementations as own

AT_ONCE = 1 << 28
"""Floats converted by one launch: 1 GiB."""
GEOMETRY = Geometry((1024, 1, 1), (256, 1, 1))
TWINS = "e2m1"
"""Stands among the names of implementations for the conversions of sm12x.cuh."""
LIMIT = 600
"""Seconds that one process may take."""


def library(arch: str) -> KernelLibrary:
    """The kernels of gb10 for ``arch``, compiled if they are stale."""
    tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_gb10")])
    found = KernelLibrary(tree, places, Target("gb10", arch))
    if found.stale():
        Builder(tree, places, {"nvidia": NvidiaComputeTarget()}, os.cpu_count() or 1).build(Job("gb10", arch, COMMON))
        found = KernelLibrary(tree, places, Target("gb10", arch))
    return found


def implementations() -> list[OpImplementation]:
    """What the machine inherits, replaced by name as the assembly does."""
    return list({i.name: i for i in (*baseline.implementations(), *own.implementations())}.values())


def converted(gpu: GpuBackend, entry: str, source: np.ndarray, nbytes: int) -> np.ndarray:
    """``source`` through an entry of nvfp4_convert, ``nbytes`` of results."""
    given, made = gpu.alloc(source.nbytes), gpu.alloc(nbytes)
    result = np.empty(nbytes, np.uint8)
    pairs = source.nbytes if source.dtype == np.uint8 else source.size // 2
    args: list[Arg] = [ptr(given), ptr(made), i64(pairs)]
    stream = gpu.create_stream()
    gpu.copy_h2d(source.data.cast("B"), given)
    gpu.enqueue(gpu.prepare_launch(gpu.kernel("nvfp4_convert", entry), GEOMETRY, args), stream)
    gpu.synchronize(stream)
    gpu.copy_d2h(made, result.data)
    gpu.free(given)
    gpu.free(made)
    return result


def twins(gpu: GpuBackend) -> dict[str, Any]:
    """Whether each conversion and its twin give the same bits for all floats, and for all bytes of codes."""
    codes = np.arange(256, dtype=np.uint8)
    differing = int(
        (converted(gpu, "e2m1_decode", codes, 1024) != converted(gpu, "e2m1_decode_twin", codes, 1024)).sum()
    )
    for start in range(0, 1 << 32, AT_ONCE):
        bits = np.arange(start, start + AT_ONCE, dtype=np.uint32)
        native, twin = (converted(gpu, entry, bits, AT_ONCE // 2) for entry in ("e2m1_encode", "e2m1_encode_twin"))
        differing += int((native != twin).sum())
    wrong = (
        [f"{differing} bytes of all 2^32 floats and all 256 bytes of codes differ from the twin's"] if differing else []
    )
    return {
        "op": TWINS,
        "name": "encode, decode",
        "passed": 2 - bool(differing),
        "failed": int(bool(differing)),
        "wrong": wrong,
    }


def trials(gpu: GpuBackend, name: str, text: str, arch: str) -> dict[str, Any]:
    """The trials of one implementation whose id contains ``text``."""
    chosen = [i for i in implementations() if i.name == name]
    report = test(Subject(gpu, chosen, arch, "fast", fused_ops()), Options(text, ELEMENTS))
    wrong = [f"{r.id}: {r.detail}" for r in report.failures] + [report.lost] * bool(report.lost)
    if not text:
        wrong += [f"{what}: no trial is supported" for what in (*report.missing, *report.untested)]
    passed = sum(r.status == "passed" for r in report.results)
    return {"op": chosen[0].op, "name": name, "passed": passed, "failed": len(report.failures), "wrong": wrong}


def alone(name: str, text: str) -> int:
    """One implementation in this process; prints a line of JSON."""
    arch = device(0).arch
    gpu = open_backend(library(arch))
    try:
        print(json.dumps(twins(gpu) if name == TWINS else trials(gpu, name, text, arch)))
    finally:
        gpu.close()
    return 0


def aside(name: str, text: str) -> dict[str, Any]:
    """The same in a process of its own, whatever becomes of that, and the seconds it took."""
    began = time.perf_counter()
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [sys.executable, str(Path(__file__).resolve()), "--alone", name, text]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT, env=os.environ | single
        )
        row = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None
        why = f"its process ended with {ran.returncode}: {ran.stderr.strip()[-600:]}"
    except subprocess.TimeoutExpired:
        row, why = None, f"its process had not ended after {LIMIT} s"
    return (row or {"op": "?", "name": name, "passed": 0, "failed": 0, "wrong": [f"{name}: {why}"]}) | {
        "seconds": time.perf_counter() - began
    }


def main() -> int:
    """Everything, some of it, or only the binaries; 0 when everything passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="", metavar="FILTER", help="only trials whose id contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--build", metavar="ARCH", help="only compile what is stale, for sm_121a, sm_120f or sm_90a")
    parser.add_argument("--alone", metavar="IMPLEMENTATION", help="one in this process, as JSON")
    asked = parser.parse_args()
    if asked.build:
        return 1 if library(asked.build).stale() else 0
    if asked.alone:
        return alone(asked.alone, asked.text)
    found = device(0)
    library(found.arch)
    print(f"gb10 for {found.arch} on {found.name}", flush=True)
    began = time.perf_counter()
    # The conversions take longest: they move 48 GiB.
    names = [
        *([] if asked.text else [TWINS]),
        *(i.name for i in sorted(implementations(), key=lambda i: i.op, reverse=True)),
    ]
    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(lambda name: aside(name, asked.text), names))
    rows.sort(key=lambda row: (row["op"], row["name"]))
    for row in rows:
        if row["passed"] or row["wrong"]:
            print(
                f"{row['op']:<32} {row['name']:<40} {row['passed']:>5} passed {row['failed']:>3} failed {row['seconds']:6.1f} s"
            )
    wrong = [sentence for row in rows for sentence in row["wrong"]]
    print("\n".join(f"WRONG {sentence}" for sentence in wrong))
    passed, failed = (sum(row[key] for row in rows) for key in ("passed", "failed"))
    print(
        f"{sum(row['op'] != TWINS for row in rows)} implementations, {passed} trials passed, {failed} failed, {time.perf_counter() - began:.1f} s"
    )
    return 0 if passed and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())

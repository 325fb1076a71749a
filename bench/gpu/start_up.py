"""From process start to the first token over HTTP: a checkpoint of Llama-3.1-8B's shape, written here, in the page cache and from disk.

    python bench/gpu/start_up.py build-bench/llama8b [--hardware hopper] [--layers 32] [--rounds 2] [--cold] [--packed] [-- OPTIONS OF atlas serve]

The checkpoint (bf16, four shards, seeded) is written once and is in the page cache afterwards. Each round starts ``atlas serve`` and
asks for one token as soon as /health says ready. ``--cold`` adds a round for which the shards were dropped from the page cache, beside
the speed at which this disk gives them: a quarter of them before that round and another behind it, since disks of virtual machines
are now faster and now slower; when the engine read from it, and how fast, is sampled meanwhile. ``--packed``
adds rounds with ``--packed-cache``: one that writes the image, one that finds it in the page cache, with ``--cold`` one from disk. Prints
the server's ledger.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
SHARDS = 4
POOL = 64 << 20
PIECE = 16 << 20
PORT = 8917
WAIT = 300.0
READING = 16 << 20
"""Bytes from which on weights are being read."""


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor, in the order of the file."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        yield f"{stem}.input_layernorm.weight", (HIDDEN,)
        yield f"{stem}.post_attention_layernorm.weight", (HIDDEN,)
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }.items():  # fmt: skip
            yield f"{stem}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_checkpoint(folder: Path, layers: int) -> None:
    """config.json, tokenizer.json and the shards, unless they are there."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257,
    }))  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(VOCABULARY)))
    tensors = list(shapes(layers))
    total = sum(2 * int(np.prod(shape)) for _, shape in tensors)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(SHARDS)]
    done = 0
    for name, shape in tensors:
        groups[min(done * SHARDS // total, SHARDS - 1)].append((name, shape))
        done += 2 * int(np.prod(shape))
    rng = np.random.default_rng(7)
    pool = (rng.standard_normal(POOL // 2, np.float32) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint8)
    ones = np.ones(HIDDEN, ml_dtypes.bfloat16).view(np.uint8)
    index, jobs, files = {}, [], []
    for number, group in enumerate(groups):
        shard = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        header: dict[str, Any] = {}
        position = 0
        for name, shape in group:
            end = position + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
            index[name], position = shard, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = os.open(folder / shard, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        files.append(file)
        os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
        for name, entry in header.items():
            start, end = (8 + len(text) + offset for offset in entry["data_offsets"])
            jobs += [(file, at, min(PIECE, end - at), "norm" in name) for at in range(start, end, PIECE)]

    def write(job: tuple[int, int, int, bool]) -> None:
        file, start, nbytes, norm = job
        shift = start * 7919 % (POOL - PIECE) // 2 * 2
        os.pwrite(file, (ones[:nbytes] if norm else pool[shift : shift + nbytes]).data, start)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(write, jobs))
    for file in files:
        os.close(file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "done").touch()


def tokenizer(size: int) -> dict[str, object]:
    """A byte-level BPE of so many tokens; the merges are random pairs of shorter tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    tokens = [*map(chr, printable), *(chr(0x100 + rank) for rank in range(len(rest)))]
    special = ["<|begin|>", "<|end|>"]
    known, merges = {*tokens}, []
    rng = np.random.default_rng(3)
    while len(tokens) + len(special) < size:
        for left, right in rng.integers(0, len(tokens), (4096, 2)).tolist():
            made = tokens[left] + tokens[right]
            if len(made) <= 12 and made not in known and len(tokens) + len(special) < size:
                known.add(made)
                tokens.append(made)
                merges.append([tokens[left], tokens[right]])
    vocabulary = {token: rank + (2 if rank >= 256 else 0) for rank, token in enumerate(tokens)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": 256 + rank, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for rank, token in enumerate(special)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary | {t: 256 + r for r, t in enumerate(special)}, "merges": merges},
    }  # fmt: skip


def drop_from_cache(folder: Path) -> None:
    """Write shards and image out and drop their pages."""
    os.sync()
    for path in [*folder.glob("*.safetensors"), *folder.glob("images/*")]:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def disk_speed(folder: Path, nbytes: int = 4 << 30, threads: int = 8) -> float:
    """Bytes a second that the disk gives to direct reads of 16 MiB."""
    import mmap

    path = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    nbytes = min(nbytes, path.stat().st_size // PIECE * PIECE)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = threading.local()

    def read(start: int) -> int:
        if not hasattr(buffers, "page"):
            buffers.page = mmap.mmap(-1, PIECE)
        return os.preadv(file, [buffers.page], start)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as workers:
        got = sum(workers.map(read, range(0, nbytes, PIECE)))
    speed = got / (time.perf_counter() - began)
    os.close(file)
    return speed


class DiskWatch:
    """What a server's engine has read from disks so far, by the kernel's count (read_bytes of /proc/PID/io), sampled."""

    def __init__(self, began: float, server: int) -> None:
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(began, server))
        self._thread.start()

    def _run(self, began: float, server: int) -> None:
        children = Path(f"/proc/{server}/task/{server}/children")
        while not self._ended.wait(0.02):
            with contextlib.suppress(OSError, ValueError):
                total = 0
                for child in children.read_text().split():
                    lines = Path(f"/proc/{child}/io").read_text().splitlines()
                    total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
                self._samples.append((time.perf_counter() - began, total))

    def report(self) -> str:
        """When reading began and ended, and GB/s of every second between."""
        self._ended.set()
        self._thread.join()
        if not self._samples or self._samples[-1][1] < READING:
            return "nothing was read from disk"
        most = self._samples[-1][1]
        first = max(at for at, nbytes in self._samples if nbytes < READING)
        last = min(at for at, nbytes in self._samples if nbytes == most)
        marks = [*np.arange(first, last, 1.0), last]
        times, counts = np.array(self._samples, np.float64).T
        rates = np.diff(np.interp(marks, times, counts)) / np.diff(marks) / 1e9
        return (
            f"the disk was read from {first:.2f} to {last:.2f} s, {most / (last - first) / 1e9:.2f} GB/s on average, by the second "
            + " ".join(f"{rate:.2f}" for rate in rates)
        )


def first_token(folder: Path, options: list[str]) -> tuple[float, float, str]:
    """Seconds from process start until the server is ready, and until it has sent a token; what was read from the disk."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "atlas_core", "serve", str(folder), "--port", str(PORT), *options]
    server = subprocess.Popen(command)
    watch = DiskWatch(began, server.pid)
    base = f"http://127.0.0.1:{PORT}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{base}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if server.poll() is not None or time.perf_counter() - began > WAIT:
                    raise SystemExit(f"the server did not start: {server.poll()}") from None
                time.sleep(0.005)
        ready = time.perf_counter() - began
        body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            first = time.perf_counter() - began
            answer.read()
        return ready, first, watch.report()
    finally:
        watch.report()
        server.terminate()
        server.wait()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--packed", action="store_true")
    given = [*sys.argv[1:], "--"]
    arguments = parser.parse_args(given[: given.index("--")])
    began = time.perf_counter()
    write_checkpoint(arguments.folder, arguments.layers)
    total = sum(path.stat().st_size for path in arguments.folder.glob("*.safetensors"))
    print(f"checkpoint: {total / 1e9:.2f} GB, written in {time.perf_counter() - began:.1f} s", flush=True)
    options = ["--hardware", arguments.hardware, *given[given.index("--") + 1 : -1]]
    for _ in range(arguments.rounds):
        ready, first, _ = first_token(arguments.folder, options)
        print(f"page cache: ready {ready:.2f} s, first token {first:.2f} s", flush=True)
    if arguments.cold:
        cold(arguments.folder, options, total)
    if arguments.packed:
        options += ["--packed-cache", str(arguments.folder / "images")]
        for what in ("writes the image", "image in the page cache"):
            ready, first, _ = first_token(arguments.folder, options)
            print(f"{what}: ready {ready:.2f} s, first token {first:.2f} s", flush=True)
        if arguments.cold:
            cold(arguments.folder, options, total)


def cold(folder: Path, options: list[str], total: int) -> None:
    """A start from disk, between two looks at its speed."""
    drop_from_cache(folder)
    before = disk_speed(folder)
    drop_from_cache(folder)
    ready, first, read = first_token(folder, options)
    drop_from_cache(folder)
    after = disk_speed(folder)
    goal = 1.3 * total / statistics.harmonic_mean([before, after]) + 2
    print(f"disk: {before / 1e9:.2f} GB/s before and {after / 1e9:.2f} behind; ready {ready:.2f} s, first token {first:.2f} s, "
          f"goal {goal:.2f} s; {read}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

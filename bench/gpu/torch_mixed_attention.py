# ruff: noqa: TID251 -- a script that prints, for a machine where PyTorch says what is right
"""Attention of mixed steps: a piece of a prompt behind so many tokens, beside so many single queries, in the shape of Llama-3.1-8B.

    python bench/gpu/torch_mixed_attention.py [PIECE:BEHIND:DECODES:CONTEXT ...] [--heads 32 8 128] [--window 0]

Random data in pages in any order, one H200. First some queries of every kind are held against float32, and the bytes of many runs against
those of the first: a figure without that is void. Then events around replays. Needs built kernels and PyTorch; works from a checkout without
installed plugins.
"""

import argparse
from typing import Any

import torch
from torch_prompts import ARCH, PAGE, held, launches, timed

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.ops.step import COUNT_WORDS, Count, SlotLayout, Word
from atlas_core.vocab.target import Target
from atlas_nvidia.backend import open_backend

STEPS = (
    "0:0:32:700", "0:0:8:3000", "352:0:0:0", "352:3600:32:700", "352:7640:0:0", "352:7640:32:700", "224:7776:32:700", "448:4800:32:700",
    "464:7168:32:700", "352:7640:16:3000", "1:30000:31:700", "2048:0:0:0", "2048:6144:0:0", "8192:0:0:0",
)  # fmt: skip
"""What is timed when nothing is named."""
RUNS = 20
"""Whose results must be the same bytes."""


def attention(backend: Any, step: str, heads: tuple[int, int, int], window: int) -> None:
    """One step, held against float32 and timed."""
    piece, behind, decodes, context = map(int, step.split(":"))
    q_heads, kv_heads, dim = heads
    sequences = [(1, context)] * decodes + ([(piece, behind)] if piece else [])
    rows, tokens = len(sequences), piece + decodes
    lengths = [-(-(queries + before) // PAGE) for queries, before in sequences]
    layout = SlotLayout(rows, (max(lengths),), 1)
    slots = torch.zeros(layout.words, dtype=torch.int32)
    order = torch.randperm(sum(lengths)).split(lengths)
    for row, pages in enumerate(order):
        slots[layout.block(row, 0, 0) : layout.block(row, 0, 0) + len(pages)] = pages.int()
        slots[layout.word(row, Word.POSITION)] = sequences[row][1]
    cache = torch.randn(sum(lengths), 2, kv_heads, PAGE, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(tokens, q_heads * dim, device="cuda", dtype=torch.bfloat16)
    y = torch.full_like(q, float("nan"))
    counts = torch.full((COUNT_WORDS,), rows, dtype=torch.int32)
    counts[Count.TOKENS] = tokens
    starts = [0]
    for queries, _ in sequences:
        starts.append(starts[-1] + queries)
    tensors = {
        "q": q, "cu_q": torch.tensor(starts, dtype=torch.int32, device="cuda"), "slots": slots.cuda(),
        "row_slot": torch.arange(rows, dtype=torch.int32, device="cuda"), "cache": cache[None], "y": y, "counts": counts.cuda(),
    }  # fmt: skip
    attrs = {
        "layer": 0, "kv_heads": kv_heads, "q_heads": q_heads, "head_dim": dim, "page_tokens": PAGE, "window": window,
        "slot_stride": layout.stride, "table_offset": layout.block(0, 0, 0), "scale": dim**-0.5,
    }  # fmt: skip
    live = {"q": "T", "y": "T"}
    name, todo = launches(backend, "paged_attention", tensors, attrs, live, "hnd_bf16", tokens, max(rows, 40))
    stream = torch.cuda.current_stream().cuda_stream

    def ours() -> None:
        for launch in todo:
            backend.enqueue(launch, stream)

    ours()
    first = y.clone()
    error, where = 0.0, ""
    for row in sorted({0, decodes // 2, rows - 1}):
        queries, before = sequences[row]
        pages = cache[order[row].cuda()].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)
        for query in sorted({0, 1, 31, queries // 2, queries - 1} & set(range(queries))):
            last = before + query + 1
            keys, values = (pages[i, :, max(0, last - window) if window else 0 : last].float() for i in (0, 1))
            mine = q[starts[row] + query].view(kv_heads, -1, dim).float()
            weights = (torch.einsum("khd,ktd->kht", mine, keys) * dim**-0.5).softmax(-1)
            want = torch.einsum("kht,ktd->khd", weights, values).reshape(-1)
            off = (first[starts[row] + query].float() - want).abs().nan_to_num(1e9).max().item()
            if off > error:
                error, where = off, f"query {query} of sequence {row}"
    held(error, 0.03, f"attention of {step}, {where},")
    for _ in range(RUNS):
        y.fill_(float("nan"))
        ours()
        if not torch.equal(first, y):
            raise SystemExit(f"attention of {step} is another every time: no figure means anything")
    (mine_us,) = timed(ours)
    pairs = sum(
        min(before + i + 1, window or before + i + 1)
        for queries, before in sequences
        for i in range(queries)
        if queries > 1
    )
    print(f"attention of {piece} behind {behind}, {decodes} of 1 behind {context}: {mine_us:7.1f} us, prompts "
          f"{4e-6 * pairs * q_heads * dim / mine_us:4.0f} TFLOP/s, off by {error:.4f}, {RUNS} times the same  {name}", flush=True)  # fmt: skip


def main() -> None:
    """All steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=STEPS)
    parser.add_argument("--heads", nargs=3, type=int, default=(32, 8, 128), help="query heads, key heads, size")
    parser.add_argument("--window", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
    backend = open_backend(KernelLibrary(tree, places, Target("hopper", ARCH)))
    for step in options.steps:
        attention(backend, step, tuple(options.heads), options.window)


if __name__ == "__main__":
    main()

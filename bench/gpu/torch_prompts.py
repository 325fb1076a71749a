# ruff: noqa: TID251 -- a script that prints, for a machine where PyTorch is the peer
"""What prompts rest on, beside PyTorch in the same process: products against cuBLAS, causal attention against SDPA's backends.

Of a layer, what begins with a norm is one op here (norm, query, key and value projections, rotation, pages; norm, gate, up, SwiGLU): its
peer is cuBLAS with the product alone, of the matrices as one.

    python bench/gpu/torch_prompts.py

Random data, bfloat16, one H200. The implementation is the one that the planner would choose, its launch goes to PyTorch's stream, and both sides
are timed by events around replays, in turns. First each result is held against float32: a figure without that is void. Needs built
kernels and PyTorch; works from a checkout without installed plugins.
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.contracts.ops import BindContext, Buffer, OperandSpec, OpNeed
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.ops.step import COUNT_WORDS, Count, SlotLayout, Word
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import plain
from atlas_core.vocab.target import Target
from atlas_nvidia.backend import open_backend
from atlas_nvidia.implementations import implementations as nvidia
from atlas_plugin_hopper.implementations import implementations as hopper

ARCH, PAGE, PEAK = "sm_90a", 64, 790.0
"""``PEAK``: TFLOP/s of the largest products that cuBLAS reached on this kind of machine."""
TYPES = {torch.bfloat16: DType.BF16, torch.float32: DType.F32, torch.int32: DType.I32}
LLAMA = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
QWEN = ((12288, 4096), (4096, 12288), (4096, 2048), (512, 2048), (2048, 4096))
GATE_UP = ((14336, 4096), (12288, 4096))
QKV = ((32, 8, 4096, False), (32, 8, 4096, True), (32, 4, 2048, True))
"""Query and key heads of 128, width, and whether heads are normalised: Llama-3.1-8B, Qwen3-8B, Qwen3-30B-A3B."""
HEADS = ((32, 8, 128), (16, 2, 256), (32, 8, 64))
ROUNDS, REPEATS = 7, 10
FEWEST = 384
"""Tokens of the smallest rows, pieces of a prompt beside decodes; attention is timed alone from more than 512 on."""


def launches(backend: Any, op: str, tensors: dict[str, torch.Tensor], attrs: Mapping[str, Any], live: Mapping[str, str],
             kv: str | None, tokens: int, sequences: int = 1) -> tuple[str, list[Any]]:  # fmt: skip
    """The best implementation's name, and its launches."""
    specs = {
        name: OperandSpec(
            tuple(t.shape), TYPES[t.dtype], plain(TYPES[t.dtype]) if name.endswith(("weight", "_norm")) else None,
            live.get(name, ""),
        )
        for name, t in tensors.items()
        if name not in ("counts", "scratch")
    }  # fmt: skip
    need = OpNeed(op, specs, attrs, ARCH, "fast", tokens, sequences, sequences, tokens, kv)
    rated = [(i.supports(need), i) for i in [*nvidia(), *hopper()] if i.op == op]
    chosen = max((r for r in rated if r[0].ok), key=lambda r: r[0].rank)[1]
    buffers = {name: Buffer(t.data_ptr(), t.nbytes) for name, t in tensors.items()}
    scratch = torch.empty(chosen.scratch_bytes(need), dtype=torch.uint8, device="cuda")
    tensors["scratch"] = scratch  # as long as the launches
    room = Buffer(scratch.data_ptr(), scratch.nbytes)

    def keep(data: bytes) -> int:
        kept = tensors[f"kept {len(tensors)}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        return int(kept.data_ptr())

    context = BindContext(backend, buffers, tensors["counts"].data_ptr(), room, backend.facts().processors, keep)
    return chosen.name, list(chosen.bind(need, context))


def timed(*sides: Callable[[], None]) -> list[float]:
    """Microseconds of each side, medians of rounds in which they take turns."""
    found: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    for _ in range(ROUNDS):
        for times, side in zip(found, sides, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPEATS):
                side()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / REPEATS)
    return [statistics.median(times) for times in found]


def held(error: float, limit: float, what: str) -> None:
    """Raise SystemExit when a result is off."""
    if not error <= limit:
        raise SystemExit(f"{what} is off by {error:.4f}, more than {limit}: no figure means anything")


def product(backend: Any, tokens: int, rows: int, width: int) -> None:
    """One product of a prompt."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
    y = torch.full((tokens, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
    counts = torch.full((COUNT_WORDS,), tokens, dtype=torch.int32, device="cuda")
    tensors = {"x": x, "weight": weight, "y": y, "counts": counts}
    name, todo = launches(backend, "linear", tensors, {}, {"x": "T", "y": "T"}, None, tokens)
    stream = torch.cuda.current_stream().cuda_stream

    def ours() -> None:
        for launch in todo:
            backend.enqueue(launch, stream)

    ours()
    want = x.float() @ weight.float().T
    held((y.float() - want).abs().max().item(), 0.04, f"{tokens} × {width} × {rows}")
    mine, theirs = timed(ours, lambda: torch.matmul(x, weight.T, out=y))
    rate = 2e-6 * tokens * rows * width
    print(f"product {tokens:>5} × {width:>5} × {rows:>5}  {name:<16} {mine:7.1f} us {rate / mine:4.0f} TFLOP/s "
          f"{100 * rate / mine / PEAK:3.0f} %   cuBLAS {theirs:7.1f} us   ratio {theirs / mine:.2f}", flush=True)  # fmt: skip


def _behind_norm(backend: Any, op: str, what: str, tensors: dict[str, torch.Tensor], attrs: Mapping[str, Any], kv: str | None,
                 weights: list[torch.Tensor], check: Callable[[torch.Tensor], float]) -> None:  # fmt: skip
    """An op that normalises float32 tokens x, beside cuBLAS with bfloat16 ones; ``check(products)`` is how far its results are off."""
    x, tokens = tensors["x"], tensors["x"].shape[0]
    tensors["counts"] = torch.full((COUNT_WORDS,), tokens, dtype=torch.int32, device="cuda")
    name, todo = launches(backend, op, tensors, attrs, {"x": "T", "y": "T", "q": "T"}, kv, tokens)
    stream = torch.cuda.current_stream().cuda_stream

    def ours() -> None:
        for launch in todo:
            backend.enqueue(launch, stream)

    ours()
    normed = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors["norm_weight"].float()).bfloat16()
    every = torch.cat(weights)
    held(check(normed.float() @ every.float().T), 0.05, what)
    out = torch.empty(tokens, every.shape[0], device="cuda", dtype=torch.bfloat16)
    mine, product, theirs = timed(
        ours, partial(backend.enqueue, todo[-1], stream), lambda: torch.matmul(normed, every.T, out=out)
    )
    rate = 2e-6 * tokens * every.numel()
    print(f"{what} {tokens:>5} × {x.shape[1]:>5} × {every.shape[0]:>5}  {name:<28} {product:7.1f} us {rate / product:4.0f} TFLOP/s "
          f"{100 * rate / product / PEAK:3.0f} %, with the norm {mine:7.1f} us   cuBLAS, product alone {theirs:7.1f} us   "
          f"ratio {theirs / product:.2f}", flush=True)  # fmt: skip


def gate_up(backend: Any, tokens: int, rows: int, width: int) -> None:
    """Norm, gate, up and SwiGLU of a prompt."""
    gate, up = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * width**-0.5 for _ in range(2))
    y = torch.full((tokens, rows), float("nan"), device="cuda", dtype=torch.bfloat16)
    tensors = {
        "x": torch.randn(tokens, width, device="cuda"), "norm_weight": 1 + 0.1 * torch.randn(width, device="cuda").bfloat16(),
        "gate_weight": gate, "up_weight": up, "y": y,
    }  # fmt: skip

    def check(products: torch.Tensor) -> float:
        want = torch.nn.functional.silu(products[:, :rows]) * products[:, rows:]
        return float((y.float() - want).abs().max().item() / want.abs().max().item())

    _behind_norm(backend, "norm_gate_up_silu", "gate, up, SwiGLU", tensors, {"eps": 1e-5}, None, [gate, up], check)


def qkv(backend: Any, tokens: int, q_heads: int, kv_heads: int, width: int, normed: bool) -> None:
    """Norm, projections, rotation of a prompt, and its keys and values in pages; queries are held against float32."""
    dim, pages = 128, tokens // PAGE
    rows = (q_heads * dim, kv_heads * dim, kv_heads * dim)
    weights = [torch.randn(n, width, device="cuda", dtype=torch.bfloat16) * width**-0.5 for n in rows]
    layout = SlotLayout(1, (pages,), 1)
    slots = torch.zeros(layout.words, dtype=torch.int32)
    order = torch.randperm(pages)
    for index, page in enumerate(order.tolist()):
        slots[layout.block(0, 0, index)] = page
    frequencies = 500000.0 ** (-torch.arange(dim // 2, device="cuda", dtype=torch.float32) / (dim // 2))
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
    cache = torch.zeros(1, pages, 2, kv_heads, PAGE, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.full((tokens, rows[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
    tensors = {
        "x": torch.randn(tokens, width, device="cuda"), "norm_weight": 1 + 0.1 * torch.randn(width, device="cuda").bfloat16(),
        "q_weight": weights[0], "k_weight": weights[1], "v_weight": weights[2], "inv_freq": frequencies, "positions": positions,
        "token_row": torch.zeros_like(positions), "row_slot": torch.zeros(1, dtype=torch.int32, device="cuda"), "slots": slots.cuda(),
        "cache": cache, "q": q,
    }  # fmt: skip
    attrs = {
        "layer": 0, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "page_tokens": PAGE, "slot_stride": layout.stride,
        "table_offset": layout.block(0, 0, 0), "rope_scale": 1.0, "eps": 1e-5, "head_eps": 1e-5,
    }  # fmt: skip
    norms = [1 + 0.1 * torch.randn(dim, device="cuda").bfloat16() for _ in range(2)]
    if normed:
        tensors |= {"q_norm": norms[0], "k_norm": norms[1]}

    def turned(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        if normed:
            heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.float()
        angle = (positions.double()[:, None] * frequencies.double())[:, None]
        low, high = heads[..., : dim // 2], heads[..., dim // 2 :]
        sine, cosine = angle.sin().float(), angle.cos().float()
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)

    def check(products: torch.Tensor) -> float:
        parts = [part.view(tokens, -1, dim) for part in products.split(rows, -1)]
        stored = cache[0, order.cuda()].permute(1, 0, 3, 2, 4).reshape(2, tokens, kv_heads, dim)
        wanted = (turned(parts[0], norms[0]), turned(parts[1], norms[1]), parts[2])
        found = (q.view(tokens, q_heads, dim), stored[0], stored[1])
        return max(float((f.float() - w).abs().max().item()) for f, w in zip(found, wanted, strict=True))

    op = "norm_qkv_heads_rope_append" if normed else "norm_qkv_rope_append"
    _behind_norm(backend, op, "q, k, v, pages", tensors, attrs, "hnd_bf16", weights, check)


def attention(backend: Any, tokens: int, q_heads: int, kv_heads: int, dim: int) -> None:
    """Causal attention of one prompt over pages in any order."""
    q = torch.randn(tokens, q_heads * dim, device="cuda", dtype=torch.bfloat16)
    y = torch.full_like(q, float("nan"))
    pages = tokens // PAGE
    cache = torch.randn(pages, 2, kv_heads, PAGE, dim, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(pages)
    layout = SlotLayout(1, (pages,), 1)
    slots = torch.zeros(layout.words, dtype=torch.int32)
    for index, page in enumerate(order.tolist()):
        slots[layout.block(0, 0, index)] = page
    slots[layout.word(0, Word.POSITION)] = 0
    counts = torch.ones(COUNT_WORDS, dtype=torch.int32)
    counts[Count.TOKENS] = tokens
    tensors = {
        "q": q, "cu_q": torch.tensor([0, tokens], dtype=torch.int32, device="cuda"), "slots": slots.cuda(),
        "row_slot": torch.zeros(1, dtype=torch.int32, device="cuda"), "cache": cache[None], "y": y, "counts": counts.cuda(),
    }  # fmt: skip
    attrs = {
        "layer": 0, "kv_heads": kv_heads, "q_heads": q_heads, "head_dim": dim, "page_tokens": PAGE, "window": 0,
        "slot_stride": layout.stride, "table_offset": layout.block(0, 0, 0), "scale": dim**-0.5,
    }  # fmt: skip
    name, todo = launches(backend, "paged_attention", tensors, attrs, {"q": "T", "y": "T"}, "hnd_bf16", tokens)
    stream = torch.cuda.current_stream().cuda_stream

    def ours() -> None:
        for launch in todo:
            backend.enqueue(launch, stream)

    ours()
    ordered = cache[order.cuda()]
    keys, values = (
        ordered[:, part]
        .permute(1, 0, 2, 3)
        .reshape(kv_heads, tokens, dim)
        .repeat_interleave(q_heads // kv_heads, 0)[None]
        for part in (0, 1)
    )
    keys, values, queries = (
        keys.contiguous(),
        values.contiguous(),
        q.view(1, tokens, q_heads, dim).transpose(1, 2).contiguous(),
    )
    some = [0, 1, 127, 128, tokens // 2, tokens - 1]
    scores = torch.einsum("hqd,hkd->hqk", queries[0][:, some].float(), keys[0].float()) * dim**-0.5
    later = torch.arange(tokens, device="cuda")[None, None] > torch.tensor(some, device="cuda")[None, :, None]
    want = torch.einsum("hqk,hkd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), values[0].float())
    held((y.view(tokens, q_heads, dim)[some].float() - want).abs().max().item(), 0.04, f"attention of {dim}")

    def peer(which: SDPBackend) -> Callable[[], None]:
        def run() -> None:
            with sdpa_kernel(which):
                scaled_dot_product_attention(queries, keys, values, is_causal=True)

        return run

    peers = {"flash": peer(SDPBackend.FLASH_ATTENTION), "cuDNN": peer(SDPBackend.CUDNN_ATTENTION)}
    mine, *others = timed(ours, *peers.values())
    best, which = min(zip(others, peers, strict=True))
    rate = 2e-6 * tokens * (tokens + 1) * q_heads * dim
    print(f"attention {tokens} of {q_heads}/{kv_heads} heads of {dim:<3} {name:<24} {mine:7.1f} us {rate / mine:4.0f} TFLOP/s "
          f"{100 * rate / mine / PEAK:3.0f} %   SDPA {which} {best:7.1f} us   ratio {best / mine:.2f}", flush=True)  # fmt: skip


def main() -> None:
    """All rows."""
    torch.manual_seed(0)
    torch.zeros(1, device="cuda")
    tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
    backend = open_backend(KernelLibrary(tree, places, Target("hopper", ARCH)))
    print(f"{backend.facts().name}, PyTorch {torch.__version__}; % of {PEAK:.0f} TFLOP/s")
    for tokens in (FEWEST, 512, 2048, 8192):
        for rows, width in (*LLAMA, *QWEN):
            product(backend, tokens, rows, width)
        for rows, width in GATE_UP:
            gate_up(backend, tokens, rows, width)
        for heads, kv_heads, width, normed in QKV:
            qkv(backend, tokens, heads, kv_heads, width, normed)
        for each in HEADS if tokens > 512 else ():
            attention(backend, tokens, *each)


if __name__ == "__main__":
    main()

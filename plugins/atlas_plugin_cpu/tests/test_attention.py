"""Pages and attention: ragged batches, windows, odd head sizes, and the same bits however a prompt is cut."""

from dataclasses import dataclass

import numpy as np
import pytest

from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import SlotLayout, Word
from atlas_core.vocab.dtype import DType

OPS = ("paged_attention", "fast_paged_attention")
FAST = OPS[1:]
LIVE = dict.fromkeys(("q", "k", "v", "y", "positions", "token_row"), "T") | {"cu_q": "S+1", "row_slot": "S"}


@dataclass
class Scene:
    """Sequences with a context each, their pages scattered over a cache of two layers."""

    contexts: list[int]
    queries: list[int]
    kv_heads: int
    head_dim: int
    page_tokens: int = 16
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        slots = len(self.contexts) + 2
        blocks = -(-max(c + q for c, q in zip(self.contexts, self.queries, strict=True)) // self.page_tokens)
        self.layout = SlotLayout(slots, (3, blocks), 4)
        pages = slots * blocks + 1
        self.cache = rng.standard_normal((2, pages, 2, self.kv_heads, self.page_tokens, self.head_dim)).astype(
            np.float32
        )
        self.slots = np.zeros(self.layout.words, np.int32)
        self.row_slot = rng.permutation(slots)[: len(self.contexts)].astype(np.int32)
        free = iter(rng.permutation(pages))
        for slot, context in zip(self.row_slot, self.contexts, strict=True):
            self.slots[self.layout.word(slot, Word.POSITION)] = context
            for block in range(blocks):
                self.slots[self.layout.block(slot, 1, block)] = next(free)
        self.cu_q = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        self.tokens = int(self.cu_q[-1])

    def attrs(self, **more):
        return {
            "layer": 1, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "page_tokens": self.page_tokens,
            "slot_stride": self.layout.stride, "table_offset": self.layout.table_offset(1), **more,
        }  # fmt: skip

    def arrays(self, **more):
        return {"row_slot": self.row_slot, "slots": self.slots, "cache": self.cache, **more}


def attend(bench, make_step, scene, q, cu_q=None, slots=None, op="paged_attention", **attrs):
    cu_q = scene.cu_q if cu_q is None else cu_q
    arrays = scene.arrays(q=q, cu_q=cu_q) | ({} if slots is None else {"slots": slots})
    step = make_step(tokens=len(q), sequences=len(cu_q) - 1, live=LIVE, max_query=int(np.diff(cu_q).max()))
    numerics = "fast" if op in FAST else "exact"
    return arrays, bench.run(op, arrays, attrs, step, {"y": (q.shape, np.float32)}, numerics=numerics)["y"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "page_tokens", "window"),
    [
        (9, 3, 64, 16, 0),
        (4, 4, 8, 1, 0),
        (6, 2, 40, 7, 0),
        (8, 1, 128, 64, 0),
        (2, 2, 256, 16, 5),
        (12, 1, 72, 32, 100),
    ],
)
def test_attention_over_ragged_sequences(bench, make_step, q_heads, kv_heads, head_dim, page_tokens, window, op):
    scene = Scene([0, 200, 1, 63, 64, 0], [1, 1, 70, 2, 1, 9], kv_heads, head_dim, page_tokens)
    q = np.random.default_rng(1).standard_normal((scene.tokens, q_heads * head_dim)).astype(np.float32)
    attrs = scene.attrs(q_heads=q_heads, scale=head_dim**-0.5, window=window)
    arrays, got = attend(bench, make_step, scene, q, op=op, **attrs)
    want = dict(arrays)
    contract = PRIMITIVES["paged_attention"]
    contract.reference(want, attrs)
    tolerance = contract.tolerances[DType.F32]
    row = np.sqrt(np.mean(want["y"] ** 2, axis=1, keepdims=True)) * (contract.fast_of_row if op in FAST else 0)
    allowed = tolerance.absolute + tolerance.relative * np.abs(want["y"]) + row
    assert (np.abs(got - want["y"]) <= allowed).all()
    if op in FAST:
        assert np.sqrt(np.mean((got - want["y"]) ** 2)) < 0.006 * np.sqrt(np.mean(want["y"] ** 2))


def test_attention_survives_scores_that_overflow_an_exponential(bench, make_step):
    scene = Scene([150], [3], 1, 64)
    q = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32) * 100
    attrs = scene.attrs(q_heads=1, scale=1.0, window=0)
    arrays, got = attend(bench, make_step, scene, q, **attrs)
    want = dict(arrays)
    PRIMITIVES["paged_attention"].reference(want, attrs)
    np.testing.assert_allclose(got, want["y"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("head_dim", "window"), [(64, 0), (128, 0), (24, 0), (64, 20)])
def test_chunks_give_the_bits_of_the_whole(bench, make_step, head_dim, window, op):
    total = 150
    scene = Scene([0], [total], 2, head_dim)
    q = np.random.default_rng(3).standard_normal((total, 6 * head_dim)).astype(np.float32)
    attrs = scene.attrs(q_heads=6, scale=head_dim**-0.5, window=window)
    _, whole = attend(bench, make_step, scene, q, op=op, **attrs)
    for chunk in (1, 7, 64):
        slots, parts = scene.slots.copy(), []
        for start in range(0, total, chunk):
            part = q[start : start + chunk]
            slots[scene.layout.word(scene.row_slot[0], Word.POSITION)] = start
            cu_q = np.array([0, len(part)], np.int32)
            parts.append(attend(bench, make_step, scene, part, cu_q, slots, op, **attrs)[1])
        np.testing.assert_array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32), str(chunk))


def test_neighbours_do_not_change_bits(bench, make_step):
    scene = Scene([100, 37, 5, 64, 128, 0, 1, 90], [1] * 8, 3, 64)
    q = np.random.default_rng(4).standard_normal((8, 9 * 64)).astype(np.float32)
    attrs = scene.attrs(q_heads=9, scale=0.125, window=0)
    _, together = attend(bench, make_step, scene, q, **attrs)
    for row in range(8):
        arrays = scene.arrays(q=q[row : row + 1], cu_q=np.array([0, 1], np.int32)) | {
            "row_slot": scene.row_slot[row : row + 1]
        }
        step = make_step(tokens=1, sequences=1, live=LIVE)
        alone = bench.run("paged_attention", arrays, attrs, step, {"y": ((1, 9 * 64), np.float32)})["y"]
        np.testing.assert_array_equal(alone[0].view(np.uint32), together[row].view(np.uint32))


@pytest.mark.parametrize(("head_dim", "page_tokens", "window"), [(64, 16, 0), (40, 7, 0), (256, 16, 70), (16, 32, 0)])
def test_every_instruction_set_gives_the_same_bits(benches, make_step, head_dim, page_tokens, window):
    scene = Scene([3, 200, 0], [40, 1, 150], 2, head_dim, page_tokens)
    rng = np.random.default_rng(7)
    q = rng.standard_normal((scene.tokens, 6 * head_dim)).astype(np.float32) * 3
    # Numbers whose products tiles take for zero, and others do not.
    tiny = rng.random(scene.cache.shape) < 0.3
    scene.cache[tiny] *= 1e-30
    q[rng.random(q.shape) < 0.3] *= 1e-20
    scene.cache[:, :, 1, :, :, 0] = 1e-35
    attrs = scene.attrs(q_heads=6, scale=head_dim**-0.5, window=window)
    found = [attend(one, make_step, scene, q, op="fast_paged_attention", **attrs)[1] for one in benches]
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


def test_a_replay_reads_lengths_anew(bench, make_step):
    scene = Scene([10, 80], [1, 1], 1, 64)
    q = np.random.default_rng(5).standard_normal((2, 64)).astype(np.float32)
    attrs = scene.attrs(q_heads=1, scale=0.125, window=0)
    arrays = scene.arrays(q=q, cu_q=scene.cu_q)

    def mutate(memory):
        memory["slots"][scene.layout.word(scene.row_slot[1], Word.POSITION)] = 3
        memory["q"][:2] += 1

    step = make_step(tokens=2, sequences=2, live=LIVE)
    got = bench.run("paged_attention", arrays, attrs, step, {"y": (q.shape, np.float32)}, mutate)["y"]
    want = arrays | {"q": q + 1, "slots": arrays["slots"].copy()}
    want["slots"][scene.layout.word(scene.row_slot[1], Word.POSITION)] = 3
    PRIMITIVES["paged_attention"].reference(want, attrs)
    np.testing.assert_allclose(got, want["y"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("head_dim", "page_tokens"), [(64, 16), (8, 3)])
def test_append_writes_its_places_and_no_other(bench, make_step, head_dim, page_tokens):
    scene = Scene([0, 20, 3], [5, 1, 4], 2, head_dim, page_tokens)
    rng = np.random.default_rng(6)
    k, v = (rng.standard_normal((scene.tokens, 2 * head_dim)).astype(np.float32) for _ in range(2))
    token_row = np.repeat(np.arange(3), scene.queries).astype(np.int32)
    positions = np.concatenate([c + np.arange(q) for c, q in zip(scene.contexts, scene.queries, strict=True)]).astype(
        np.int32
    )
    arrays = scene.arrays(k=k, v=v, positions=positions, token_row=token_row)
    step = make_step(tokens=scene.tokens, sequences=3, live=LIVE)
    got = bench.run("kv_append", arrays, scene.attrs(), step, {})["cache"]
    want = arrays | {"cache": scene.cache.copy()}
    PRIMITIVES["kv_append"].reference(want, scene.attrs())
    np.testing.assert_array_equal(got, want["cache"])
    assert (got != scene.cache).any()

"""The golden engine against a forward pass that knows nothing of pages, slots or programs."""

import numpy as np
import pytest

from atlas_core.conformance.decoder import SHAPES, record_decoder
from atlas_core.conformance.fused_trials import step_values, weight_values
from atlas_core.model.interpreter import Interpreter, interpret
from atlas_core.ops.batch import BatchShape, make_batch
from atlas_core.ops.step import Word
from atlas_core.vocab.sampling import SamplingParams

SHAPE = SHAPES[0]
MODEL = record_decoder(SHAPE)
WEIGHTS = {value.name: weight_values(MODEL, value.name) for value in MODEL.program.weights()}


def forward(tokens):
    """Logits of every position: whole sequence, complex rotation, one softmax a head."""
    w = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    dim, group = SHAPE.head_dim, SHAPE.heads // SHAPE.kv_heads
    turn = np.exp(1j * np.arange(len(tokens))[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2)))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def rotate(x):
        z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    h = w["embed"][tokens]
    for layer in range(SHAPE.layers):
        stem = f"layers.{layer}"
        x = norm(h, f"{stem}.attention_norm")
        heads = []
        for head in range(SHAPE.heads):
            q = rotate(x @ w[f"{stem}.q"][head * dim : (head + 1) * dim].T)
            at = slice(head // group * dim, (head // group + 1) * dim)
            k, v = rotate(x @ w[f"{stem}.k"][at].T), x @ w[f"{stem}.v"][at].T
            score = np.where(np.tri(len(tokens)) > 0, q @ k.T / np.sqrt(dim), -np.inf)
            weight = np.exp(score - score.max(-1, keepdims=True))
            heads.append(weight / weight.sum(-1, keepdims=True) @ v)
        h = h + np.concatenate(heads, -1) @ w[f"{stem}.o"].T
        x = norm(h, f"{stem}.mlp_norm")
        gate = x @ w[f"{stem}.gate"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w[f"{stem}.up"].T)) @ w[f"{stem}.down"].T
    return norm(h, "final_norm") @ w["head"].T


def batch_of(queries, contexts, seed=0):
    shape = BatchShape(MODEL.layout.slots, SHAPE.page_tokens, 40)
    return make_batch(np.random.default_rng(seed), shape, queries, contexts)


def logits_of(program):
    return program.results[3].name


def run_chunks(tokens, chunks):
    """Feed one sequence chunk by chunk; the logits of every chunk's last position."""
    batch = batch_of((len(tokens),), (0,))
    values = {**WEIGHTS, **step_values(MODEL, batch, np.random.default_rng(0))}
    values["cache.full"][...] = np.nan
    logits, done = [], 0
    for chunk in chunks:
        inputs = {
            "token_ids": np.array(tokens[done : done + chunk], np.int32), "cu_q": np.array([0, chunk], np.int32),
            "logits_rows": np.array([chunk - 1], np.int32), "sample_row": np.array([0], np.int32),
        }  # fmt: skip
        result = interpret(MODEL.program, {**values, **inputs})
        logits.append(result[logits_of(MODEL.program)][0])
        done += chunk
    return np.array(logits)


@pytest.mark.parametrize("chunks", [[21], [1] * 21, [7, 7, 7], [16, 1, 4], [20, 1]])
def test_logits_equal_the_whole_forward_pass_however_the_prompt_is_cut(chunks):
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab, 21)
    want = forward(tokens)[np.cumsum(chunks) - 1]
    np.testing.assert_allclose(run_chunks(tokens, chunks), want, rtol=1e-4, atol=1e-4)


def test_a_whole_step_samples_advances_and_feeds_back():
    """Greedy decoding of two sequences at once, with the sampled tokens taken from the slots (−1)."""
    prompts = [np.array([5, 9, 2]), np.array([11])]
    batch = batch_of((3, 1), (0, 0))
    values = {**WEIGHTS, **step_values(MODEL, batch, np.random.default_rng(0))}
    for row in range(2):
        batch.set_sampling(row, SamplingParams(temperature=0.0))
        values["slots"][batch.word(row, Word.TEMPERATURE)] = 0
    start = batch.shape.layout.table_offset(0)
    for row, slot in enumerate(batch.row_slot):  # room for what is decoded
        values["slots"][batch.shape.layout.word(int(slot), start) :][:2] = [2 * row, 2 * row + 1]
    values["token_ids"] = np.concatenate(prompts).astype(np.int32)
    told = [[], []]
    for step in range(4):
        if step:
            values |= {"token_ids": np.full(2, -1, np.int32), "cu_q": np.arange(3, dtype=np.int32)}
            values["logits_rows"] = np.arange(2, dtype=np.int32)
        result = interpret(MODEL.program, values)
        for row in range(2):
            told[row].append(int(result["sampled"][row]))
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for token in told[row]:
            assert token == int(np.argmax(forward(np.array(text))[-1]))
            text.append(token)
        assert values["slots"][batch.word(row, Word.POSITION)] == len(prompt) + 3
        assert values["slots"][batch.word(row, Word.LAST_TOKEN)] == told[row][-1]


def test_segments_run_apart_and_missing_values_are_named():
    batch = batch_of((2,), (0,))
    values = {**WEIGHTS, **step_values(MODEL, batch, np.random.default_rng(0))}
    interpreter = Interpreter(MODEL.program, values)
    interpreter.segment("forward")
    assert "sampled" not in interpreter.values
    interpreter.segment("sample")
    assert interpreter.values["sampled"].shape == (1,)
    del values["token_ids"]
    with pytest.raises(ValueError, match="step_begin.*needs token_ids"):
        interpret(MODEL.program, values)
    wrong = {**values, "token_ids": np.zeros(2, np.int32), "embed": np.zeros((3, 3), np.float32)}
    with pytest.raises(ValueError, match=r"embed has shape \[3, 3\]"):
        interpret(MODEL.program, wrong)

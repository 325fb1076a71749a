"""The meaning of the ops between logits and the next token, in numpy.

Randomness has no state: the noise of a token is a hash of (seed, absolute position, token id), so a sequence samples the same
text alone, in any batch, after preemption and under speculation. The hash is SplitMix64 (Steele et al., 2014) used as a counter.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_core.ops.contract import Arrays
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.ops.step import Word
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS

Attrs = Mapping[str, Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def gumbel(seed: int, position: int, vocab: int) -> np.ndarray:
    """float32 Gumbel noise of every token: -log(-log u), u from the upper 24 bits of the hash, centred.

    key = mix(seed + golden * (position + 1)); token i hashes mix(key + golden * (i + 1)); all modulo 2^64.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed], np.uint64) + _GOLDEN * np.uint64(position + 1))
        z = _mix(key + _GOLDEN * (np.arange(vocab, dtype=np.uint64) + np.uint64(1)))
    u = ((z >> np.uint64(40)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    # The largest draw rounds to 1: infinite noise would make one token in 2^24 win against any logit.
    u = np.minimum(u, np.float32(1 - 2.0**-24))
    noise: np.ndarray = -np.log(-np.log(u))
    return noise


def _float(word: np.int32) -> float:
    return float(np.array([word], np.int32).view(np.float32)[0])


def process_logits(a: Arrays, attrs: Attrs) -> None:
    """Bias, mask and penalties; rows of no sequence are copied.

    Repetition divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al., 2019);
    frequency and presence count generated tokens only.
    """
    out = a["logits"].astype(np.float32).copy()
    slots = a["slots"]
    for index, row in enumerate(a["sample_row"]):
        if row < 0:
            continue
        slot = int(a["row_slot"][row])
        base = slot * attrs["slot_stride"]
        start = attrs["bias_start"] + 2 * slots[base + Word.BIAS_START]
        for pair in range(int(slots[base + Word.BIAS_COUNT])):
            out[index, slots[start + 2 * pair]] += np.float32(_float(slots[start + 2 * pair + 1]))
        if slots[base + Word.MASK]:
            allowed = np.unpackbits(a["mask"][slot].view(np.uint8), bitorder="little")[: out.shape[1]]
            out[index, allowed == 0] = -np.inf
        penalty = slots[base + Word.PENALTY_ROW]
        if penalty >= 0:
            counts = a["penalty"][penalty]
            repetition = np.float32(_float(slots[base + Word.REPETITION]))
            value = out[index]
            seen = counts != 0
            value[seen] = np.where(value[seen] > 0, value[seen] / repetition, value[seen] * repetition)
            generated = counts & (PROMPT_BIT - 1)
            value -= np.float32(_float(slots[base + Word.FREQUENCY])) * generated.astype(np.float32)
            value -= np.float32(_float(slots[base + Word.PRESENCE])) * (generated > 0).astype(np.float32)
    a["y"] = out


def choose(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, noise: np.ndarray) -> int:
    """One token: temperature, then top-k, top-p (on the renormalised rest), min-p, then the largest logit + noise.

    Ties go to the lower id everywhere; at least one token survives every filter. Temperature 0 is the plain maximum.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    vocab = logits.shape[0]
    scaled = (logits.astype(np.float32) - np.float32(logits.max())) / np.float32(temperature)
    order = np.argsort(-scaled, kind="stable")
    if 0 < top_k < vocab:
        order = order[:top_k]
    if top_p < 1:
        mass = np.exp(scaled[order].astype(np.float64))
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        order = order[: max(1, int(np.count_nonzero(before < top_p * mass.sum())))]
    if min_p > 0:
        order = order[np.exp(scaled[order].astype(np.float64)) >= min_p]
    keys = scaled[order] + noise[order]
    best = keys.max()
    return int(order[keys == best].min())


def sample(a: Arrays, attrs: Attrs) -> None:
    """The next token of each row that belongs to a sequence; other rows give -1."""
    slots, logits = a["slots"], a["logits"]
    out = np.full(logits.shape[0], -1, np.int32)
    for index, row in enumerate(a["sample_row"]):
        if row < 0:
            continue
        base = int(a["row_slot"][row]) * attrs["slot_stride"]
        position = int(slots[base + Word.POSITION]) + int(a["cu_q"][row + 1] - a["cu_q"][row])
        low, high = (int(slots[base + word]) & 0xFFFFFFFF for word in (Word.SEED_LOW, Word.SEED_HIGH))
        noise = gumbel(low | high << 32, position, logits.shape[1])
        temperature, top_p, min_p = (_float(slots[base + w]) for w in (Word.TEMPERATURE, Word.TOP_P, Word.MIN_P))
        out[index] = choose(logits[index], temperature, int(slots[base + Word.TOP_K]), top_p, min_p, noise)
    a["sampled"] = out


def logprobs(a: Arrays, attrs: Attrs) -> None:
    """log softmax of the unmodified logits: the sampled token first, then the most likely ones, best first, ties by id.

    ``scored`` has a token and a number of alternatives for rows whose token is given, as those of prompts are; -1 for others. Rows
    that want none hold -1 as ids and 0 as values; so do places beyond the number wanted.
    """
    rows = a["logits"].shape[0]
    values = np.zeros((rows, 1 + MAX_TOP_LOGPROBS), np.float32)
    ids = np.full((rows, 1 + MAX_TOP_LOGPROBS), -1, np.int32)
    for index, row in enumerate(a["sample_row"]):
        token, wanted = (int(word) for word in a["scored"][index])
        if token < 0:
            token = int(a["sampled"][index])
            wanted = -1 if row < 0 else int(a["slots"][int(a["row_slot"][row]) * attrs["slot_stride"] + Word.LOGPROBS])
        if wanted < 0:
            continue
        logits = a["logits"][index].astype(np.float64)
        log = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logits, kind="stable")[:wanted]
        chosen = np.concatenate([[token], best]).astype(np.int32)
        ids[index, : len(chosen)] = chosen
        values[index, : len(chosen)] = log[chosen]
    a["values"], a["ids"] = values, ids


def advance(a: Arrays, attrs: Attrs) -> None:
    """Move every sequence on by the tokens it consumed, and remember what was sampled."""
    slots, stride = a["slots"], attrs["slot_stride"]
    for index, row in enumerate(a["sample_row"]):
        if row >= 0:
            slots[int(a["row_slot"][row]) * stride + Word.LAST_TOKEN] = a["sampled"][index]
    for row, slot in enumerate(a["row_slot"]):
        slots[int(slot) * stride + Word.POSITION] += a["cu_q"][row + 1] - a["cu_q"][row]

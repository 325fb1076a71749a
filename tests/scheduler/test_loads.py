"""Any load ends, whatever is scarce, and every answer is what it would be alone."""

import random

from harness import LIMITS, Harness, request
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted import oracle

from atlas_core.ops.step import SlotLayout

ALPHABET = 40


def scarce(draw: random.Random):
    """Limits with pages for little more than one sequence, with recurrent states or without."""
    longest = draw.choice([32, 48, 64])
    hybrid = draw.random() < 0.7
    return replace(
        LIMITS,
        layout=SlotLayout(draw.choice([1, 2, 3]), (longest // 4,), 6),
        pages=(longest // 4 + draw.choice([0, 0, 1, 2, 5]),),
        max_seq_len=longest,
        max_prefill_tokens=draw.choice([5, 9, 16, 40, 100]),
        max_mixed_tokens=draw.choice([None, 8, 12]),
        prefix_cache=hybrid or draw.random() < 0.9,
        snapshots=draw.choice([1, 2, 3, 6]) if hybrid else 0,
        chunk=8 if hybrid else 64,
        least=draw.choice([8, 16]),
    )


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32))
def test_any_load_ends_and_no_answer_depends_on_it(seed):
    draw = random.Random(seed)
    limits = scarce(draw)
    harness = Harness(limits, ahead=draw.choice([0, 1]))
    common = [draw.randrange(ALPHABET) for _ in range(limits.max_seq_len)]
    items = []
    for _ in range(draw.choice([2, 3, 4])):
        for _ in range(draw.choice([1, 1, 2, 4])):
            length = draw.randrange(1, limits.max_seq_len - 4)
            alike = draw.randrange(length + 1)
            prompt = common[:alike] + [draw.randrange(ALPHABET) for _ in range(length - alike)]
            items.append(request(str(len(items)), prompt, max_tokens=draw.randrange(1, limits.max_seq_len)))
            harness.submit(items[-1])
            if draw.random() < 0.15:
                harness.abort(items[-1].id)
        for _ in range(draw.randrange(12)):
            harness.step()
    harness.drain()
    for item in items:
        if harness.finished[item.id] != "abort":
            assert harness.out[item.id] == oracle(item, 1, (), limits.max_seq_len)

"""What a bench says that a run must move: experts nobody chose and states of idle slots are not among it."""

from math import prod

import numpy as np

from atlas_core.conformance.codecs import plain_codec
from atlas_core.conformance.run import _traffic
from atlas_core.conformance.variant import Variant, extent
from atlas_core.contracts.ops import Buffer
from atlas_core.ops.cases import trials
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType

F32 = 4


class Sizes:
    """An execution that knows its buffers' sizes only."""

    def __init__(self, variant):
        shapes = variant.trial.first.shapes
        self._sizes = {name: prod(extent(variant.bucket(), dim) for dim in dims) * F32 for name, dims in shapes.items()}

    def buffers(self):
        return {name: Buffer(0, nbytes) for name, nbytes in self._sizes.items()}


def traffic(op, label):
    trial = next(trial for trial in trials(op, 0) if label in trial.label)
    variant = Variant(PRIMITIVES[op], trial, DType.F32, plain_codec(DType.F32))
    return _traffic(Sizes(variant), variant), trial.first


def test_states_of_live_rows_there_and_back():
    got, case = traffic("gated_delta_rule", "heads=2/4 dims=16/16 rows=5")
    tokens = case.tokens
    assert (tokens, case.sequences) == (23, 5)
    qkv, gates, vectors, y, state = 2 * 2 * 16 + 4 * 16, 2 * 4, 2 * 4, 4 * 16, 4 * 16 * 16
    assert got == F32 * (tokens * (qkv + gates + y) + vectors + 2 * 5 * state)


def test_experts_that_somebody_chose():
    got, case = traffic("moe_experts", "experts=16 top=4 hidden=64 size=160 crowded decode=3")
    assert len(np.unique(case.arrays["experts"])) == 4
    assert got == F32 * (4 * 3 * 160 * 64 + case.tokens * (2 * 64 + 2 * 4))

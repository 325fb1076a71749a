"""Which combinations of types a trial is held in."""

import numpy as np
import pytest
from msgspec.structs import replace

from atlas_core.conformance.codecs import WeightCodec, plain_codec
from atlas_core.conformance.variant import Variant, variants
from atlas_core.ops.cases import GENERATORS
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.scaled import NVFP4
from atlas_core.ops.trials import Trial
from atlas_core.vocab.dtype import DType


@pytest.mark.parametrize(("within", "types"), [(False, [DType.F32]), (True, [DType.BF16, DType.F16])])
def test_an_op_of_fixed_types_is_held_in_all_that_its_parts_hand_on(within, types):
    op = replace(PRIMITIVES["gather_rows"], within=within)
    trial = next(GENERATORS["gather_rows"](np.random.default_rng(0), False))
    fixed = replace(trial.first, dtypes={"x": DType.F32, "y": DType.F32})
    found = variants(op, Trial(fixed, fixed), [DType.BF16, DType.F16], [])
    assert [variant.activation for variant in found] == types


@pytest.mark.parametrize(
    ("activation", "scaled", "numerics", "of_row"),
    [
        (DType.BF16, True, "fast", 2**-8),
        (DType.F16, True, "fast", 2**-11),
        (DType.BF16, True, "exact", 0.0),
        (DType.BF16, False, "fast", 0.0),
    ],
)
def test_scaled_numbers_may_be_rounded_to_activations_of_16_bits(activation, scaled, numerics, of_row):
    op, plain = PRIMITIVES["linear"], plain_codec(activation)
    codec = WeightCodec(NVFP4, plain.encode, plain.decode) if scaled else plain
    trial = next(GENERATORS["linear"](np.random.default_rng(0), False))
    found = Variant(op, trial, activation, codec).tolerance(op.operand("y"), numerics)
    assert found == replace(op.tolerances[activation], of_row=of_row)

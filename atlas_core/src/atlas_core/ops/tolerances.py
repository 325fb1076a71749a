"""How close implementations must come, by what happens to a value on its way through an op."""

from collections.abc import Mapping

from atlas_core.ops.contract import Tolerance
from atlas_core.vocab.dtype import DType

EXACT: Mapping[DType, Tolerance] = {dtype: Tolerance(0, 0) for dtype in (DType.F32, DType.BF16, DType.F16)}
ROUNDED: Mapping[DType, Tolerance] = {
    DType.F32: Tolerance(2e-6, 2e-6), DType.BF16: Tolerance(8e-3, 1e-3), DType.F16: Tolerance(1e-3, 1e-4),
}  # fmt: skip
"""Rounded once to the activation type (2^-9 for bf16, 2^-12 for f16) after float32 accumulation."""
SUMMED: Mapping[DType, Tolerance] = {
    DType.F32: Tolerance(2e-5, 2e-5), DType.BF16: Tolerance(1.6e-2, 8e-3), DType.F16: Tolerance(2e-3, 1e-3),
}  # fmt: skip
"""Sums of thousands of products: the error grows with the square root of the length."""

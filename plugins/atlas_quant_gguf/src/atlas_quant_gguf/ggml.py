"""The tensor types of ggml: number in the file → storage layout."""

from collections.abc import Mapping

from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout, plain

_BLOCKS = (
    # number, name, weights in a block, bytes of a block
    (2, "q4_0", 32, 18), (3, "q4_1", 32, 20), (6, "q5_0", 32, 22), (7, "q5_1", 32, 24), (8, "q8_0", 32, 34),
    (10, "q2_k", 256, 84), (11, "q3_k", 256, 110), (12, "q4_k", 256, 144), (13, "q5_k", 256, 176),
    (14, "q6_k", 256, 210), (16, "iq2_xxs", 256, 66), (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98), (19, "iq1_s", 256, 50), (20, "iq4_nl", 32, 18), (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82), (23, "iq4_xs", 256, 136), (29, "iq1_m", 256, 56), (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66), (39, "mxfp4_ggml", 32, 17), (40, "nvfp4_ggml", 64, 36),
)  # fmt: skip
_SCALARS = (
    (0, DType.F32), (1, DType.F16), (24, DType.I8), (25, DType.I16), (26, DType.I32), (27, DType.I64), (28, DType.F64),
    (30, DType.BF16),
)  # fmt: skip

TYPES: Mapping[int, StorageLayout] = {
    **{number: StorageLayout(name, block, nbytes) for number, name, block, nbytes in _BLOCKS},
    **{number: plain(dtype) for number, dtype in _SCALARS},
}
"""Blocks lie along the last dimension. Types that ggml has for activations only (q8_1, q8_k) are no types of files. MXFP4 and NVFP4 carry ``_ggml``: their scales are interleaved, unlike elsewhere."""

BY_NAME: Mapping[str, StorageLayout] = {layout.name: layout for layout in TYPES.values()}

"""Experts in FP8 and NVFP4: the packed bytes hold the same numbers, and launches fit what KERNEL.toml declares."""

import ml_dtypes
import numpy as np
import pytest
from checking import CheckingBackend

from atlas_core.conformance.codecs import codecs_of
from atlas_core.conformance.variant import variants
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.loading.scaled_format import ScaledFormat
from atlas_core.ops.cases import trials
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.scaled import E4M3_BLOCK, E4M3_ROW, E4M3_TILE, NVFP4
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import KernelError
from atlas_nvidia.implementations import coded_experts, expert_codes

FORMAT = ScaledFormat()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def unpacked(packing: str, packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What expert_codes.cuh makes of packed bytes, element by element."""
    rows, chunks = int(np.prod(shape[:-1])), -(-shape[-1] // expert_codes.CHUNK)
    codes_end, scales_end, factors_from, end = expert_codes.sections(packing, shape)
    codes, scales = packed[:codes_end].reshape(rows, -1), packed[codes_end:scales_end]
    factors = packed[factors_from:end].view(np.float32)
    if packing == expert_codes.E2M1:
        numbers = np.concatenate([E2M1, -E2M1])
        values = np.stack([numbers[codes & 15], numbers[codes >> 4]], -1).reshape(rows, -1)
        by = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(rows, -1).repeat(16, axis=1)
    else:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        by = scales.view(np.float32).reshape(rows // 8, chunks).repeat(8, axis=0).repeat(expert_codes.CHUNK, axis=1)
    assert not values[:, shape[-1] :].any()
    return (values * (by * factors[:, None]))[:, : shape[-1]].reshape(shape)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(NVFP4, (5, 96, 48)), (NVFP4, (2, 16, 256)), (E4M3_ROW, (5, 96, 48)), (E4M3_TILE, (2, 256, 384)), (E4M3_TILE, (3, 24, 128))],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_packed_experts_are_the_same_numbers(layout, shape) -> None:
    weights = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    data = FORMAT.encode(layout.name, weights)
    packed = expert_codes.packed(layout, shape)
    found = expert_codes.pack(packed.name, layout, shape, data)
    assert found.nbytes == packed.nbytes
    assert np.allclose(unpacked(packed.name, found, shape), FORMAT.decode(layout.name, data, shape), rtol=2e-7, atol=0)


def test_what_cannot_be_packed_is_refused() -> None:
    data = bytearray(FORMAT.encode(E4M3_TILE.name, np.ones((1, 8, 128), np.float32)))
    with pytest.raises(KernelError, match="cannot be packed as expert_rows_e2m1"):
        expert_codes.pack(expert_codes.E2M1, E4M3_TILE, (1, 8, 128), data)
    with pytest.raises(KernelError, match="cannot be packed"):
        expert_codes.pack(expert_codes.E4M3, E4M3_TILE, (1, 8, 128), data[:-1])
    data[:4] = np.float32(7).tobytes()
    with pytest.raises(KernelError, match="8 rows of FP8 experts have different scales"):
        expert_codes.pack(expert_codes.E4M3, E4M3_TILE, (1, 8, 128), data)


def test_every_layout_that_is_packed_has_a_kernel_for_few_and_for_many_tokens() -> None:
    backend, taken, used = CheckingBackend(64), set(), set()
    mine = [implementation for implementation in coded_experts.ALL if implementation.op == "moe_experts"]
    for trial in trials("moe_experts", 0):
        for variant in variants(PRIMITIVES["moe_experts"], trial, (DType.BF16,), codecs_of(FORMAT)):
            try:
                need = variant.need("sm_90a", "fast")
            except ValueError:
                continue  # rows are no whole blocks
            for implementation in mine:
                if implementation.supports(need).ok:
                    operands = {name: Buffer(1 << 20, 1 << 30) for name in need.operands}
                    context = BindContext(backend, operands, 1 << 12, Buffer(1 << 13, 1 << 20), 132)
                    used.update((launch.module, launch.entry) for launch in implementation.bind(need, context))
                    taken.add((variant.codec.layout.name, implementation.name))
                    packings = implementation.packings(need)
                    assert {name: packed.name for name, packed in packings.items()} == dict.fromkeys(
                        coded_experts.MATRICES, expert_codes.PACKINGS[variant.codec.layout.name]
                    )
    expected = {
        (layout.name, f"moe_experts_coded_{4 if layout == NVFP4 else 8}_{way}")
        for layout in (NVFP4, E4M3_ROW, E4M3_TILE)
        for way in ("8", "64", "sorted_64", "sorted_128")
    }
    assert taken == expected
    assert E4M3_BLOCK.name not in expert_codes.PACKINGS
    assert {kernel for made in mine for kernel in made.kernels} == used

"""Decoding of ggml's blocks: uint8 (blocks, bytes of a block) → float32 (blocks, weights of a block).

Layouts are facts of the file format. Multiplications keep ggml's order, so that float32 results are the same bits.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_F32 = np.float32
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # doubled E2M1


def _f16(blocks: Bytes, start: int) -> Floats:
    """The float16 at ``start`` of each block, as float32 (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(_F32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones, along the last axis."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _bits(packed: Bytes, width: int, count: int) -> Bytes:
    """(…, n) bytes → (…, count, n): field ``i`` of every byte, ``width`` bits each, lowest first."""
    shifts = (np.arange(count, dtype=np.uint8) * width)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """Bit 4 of 32 five-bit codes, from a little-endian u32: (blocks, 32) of 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Floats:
    return (_nibbles(b[:, 2:]).astype(_F32) - 8) * _f16(b, 0)


def _q4_1(b: Bytes) -> Floats:
    return _nibbles(b[:, 4:]).astype(_F32) * _f16(b, 0) + _f16(b, 2)


def _q5_0(b: Bytes) -> Floats:
    return ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).astype(_F32) - 16) * _f16(b, 0)


def _q5_1(b: Bytes) -> Floats:
    return (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)).astype(_F32) * _f16(b, 0) + _f16(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(_F32) * _f16(b, 0)


def _q2_k(b: Bytes) -> Floats:
    # 16 groups of 16; each byte of scales holds a scale and a minimum. Codes: two runs of 32 bytes, four fields each.
    scale = _f16(b, 80) * (b[:, :16] & 0x0F).astype(_F32)
    least = _f16(b, 82) * (b[:, :16] >> 4).astype(_F32)
    codes = _bits(b[:, 16:80].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16).astype(_F32)
    return (codes * scale[:, :, None] - least[:, :, None]).reshape(len(b), 256)


def _q3_k(b: Bytes) -> Floats:
    # Scales: 16 of 6 bits; four low bits in bytes 0 to 7 (low nibbles first), two high bits in bytes 8 to 11.
    low = _nibbles(b[:, 96:104])
    high = _bits(b[:, 104:108], 2, 4).reshape(-1, 16)
    scale = _f16(b, 108) * ((low | high << 4).astype(_F32) - 32)
    codes = _bits(b[:, 32:96].reshape(-1, 2, 32), 2, 4).reshape(-1, 8, 32)
    unset = _bits(b[:, :32], 1, 8) ^ 1  # the mask's bit says: do not subtract 4
    values = (codes.astype(_F32) - (unset << 2).astype(_F32)).reshape(-1, 16, 16)
    return (values * scale[:, :, None]).reshape(len(b), 256)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight six-bit scales and minima out of 12 bytes (q4_k, q5_k): (blocks, 8) each."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([first & 63, (third & 0x0F) | (first >> 6) << 4], axis=1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scale.astype(_F32), least.astype(_F32)


def _k_values(b: Bytes, codes: Bytes) -> Floats:
    """Codes (blocks, 8, 32) by the scales and minima at the block's start."""
    scale, least = _k_scales(b[:, 4:16])
    scale, least = _f16(b, 0) * scale, _f16(b, 2) * least
    return (codes.astype(_F32) * scale[:, :, None] - least[:, :, None]).reshape(len(b), 256)


def _q4_k(b: Bytes) -> Floats:
    return _k_values(b, _bits(b[:, 16:144].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32))


def _q5_k(b: Bytes) -> Floats:
    low = _bits(b[:, 48:176].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _k_values(b, low | _bits(b[:, 16:48], 1, 8) << np.uint8(4))


def _q6_k(b: Bytes) -> Floats:
    # Two halves of 128: 64 bytes of nibbles (32 low, 32 low, 32 high, 32 high) and 32 bytes of four two-bit fields.
    low = _bits(b[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 2, 4, 32)
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), 2, 4)
    codes = (low | high << 4).astype(_F32) - 32
    scale = _f16(b, 208) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(_F32)
    return (codes.reshape(-1, 16, 16) * scale[:, :, None]).reshape(len(b), 256)


def _iq4_nl(b: Bytes) -> Floats:
    return _IQ4[_nibbles(b[:, 2:])] * _f16(b, 0)


def _iq4_xs(b: Bytes) -> Floats:
    # Eight groups of 32; six-bit scales: four low bits in bytes 4 to 7, two high bits in the u16 at 2.
    low = np.stack([b[:, 4:8] & 0x0F, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = _bits(b[:, 2:4], 2, 4).transpose(0, 2, 1).reshape(-1, 8)
    scale = _f16(b, 0) * ((low | high << 4).astype(_F32) - 32)
    values: Floats = _IQ4[_nibbles(b[:, 8:136].reshape(-1, 8, 16))] * scale[:, :, None]
    return values.reshape(len(b), 256)


def _mxfp4(b: Bytes) -> Floats:
    # The table is doubled, so the scale 2**(e - 127) is halved; ldexp keeps the subnormal ones exact.
    scale: Floats = np.ldexp(_F32(1), b[:, :1].astype(np.int32) - 128)
    return _FP4[_nibbles(b[:, 1:])] * scale


def _bf16(b: Bytes) -> Floats:
    return (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(_F32)


def _half(b: Bytes) -> Floats:
    return np.ascontiguousarray(b).view("<f2").astype(_F32)


def _single(b: Bytes) -> Floats:
    return np.ascontiguousarray(b).view("<f4").astype(_F32)


DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "f32": _single, "f16": _half, "bf16": _bf16,
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4_ggml": _mxfp4,
}  # fmt: skip

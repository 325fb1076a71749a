"""Encoding into block formats: into the legacy ones as ggml's reference quantiser does it.

Every function takes float32 (blocks, weights of a block) and gives uint8 (blocks, bytes). All arithmetic of the legacy formats is
float32, in ggml's order, since the codes are to be the same.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from atlas_quant_gguf import encode_k

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_ONE = np.float32(1)


def _inverse(scale: Floats) -> Floats:
    inverse = np.zeros_like(scale)
    np.divide(_ONE, scale, out=inverse, where=scale != 0)
    return inverse


def _half(values: Floats) -> Bytes:
    return values.astype("<f2").view(np.uint8)


def _nibbles(codes: Bytes) -> Bytes:
    """Codes 0 to 15 of 32 weights in 16 bytes: the first half in the low nibbles."""
    return (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)


def _q4_0(x: Floats) -> Bytes:
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    codes = np.minimum(np.trunc(x * _inverse(scale) + np.float32(8.5)), 15).astype(np.uint8)
    return np.concatenate([_half(scale), _nibbles(codes)], axis=1)


def _q4_1(x: Floats) -> Bytes:
    least = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - least) / np.float32(15)
    codes = np.minimum(np.trunc((x - least) * _inverse(scale) + np.float32(0.5)), 15).astype(np.uint8)
    return np.concatenate([_half(scale), _half(least), _nibbles(codes)], axis=1)


def _q8_0(x: Floats) -> Bytes:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    # Halves go away from zero. The fraction is taken before rounding: adding 0.5 could itself round up.
    whole = np.trunc(scaled)
    codes = (whole + np.where(np.abs(scaled - whole) >= np.float32(0.5), np.sign(scaled), 0)).astype(np.int8)
    return np.concatenate([_half(scale), codes.view(np.uint8)], axis=1)


def _fifth_bits(codes: Bytes) -> Bytes:
    """Bit 4 of 32 codes as a little-endian word."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _q5_0(x: Floats) -> Bytes:
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-16)
    codes = np.minimum(np.trunc(x * _inverse(scale) + np.float32(16.5)), 31).astype(np.uint8)
    return np.concatenate([_half(scale), _fifth_bits(codes), _nibbles(codes & 15)], axis=1)


def _q5_1(x: Floats) -> Bytes:
    least = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - least) / np.float32(31)
    codes = np.minimum(np.trunc((x - least) * _inverse(scale) + np.float32(0.5)), 31).astype(np.uint8)
    return np.concatenate([_half(scale), _half(least), _fifth_bits(codes), _nibbles(codes & 15)], axis=1)


ENCODERS: Mapping[str, Callable[[Floats], Bytes]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q4_k": encode_k.q4_k, "q5_k": encode_k.q5_k, "q6_k": encode_k.q6_k, "iq4_xs": encode_k.iq4_xs,
}  # fmt: skip

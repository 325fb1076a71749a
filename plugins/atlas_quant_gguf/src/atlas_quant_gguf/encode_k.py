"""Encoding into the block formats of 256 weights, by rounding alone: ggml itself searches for scales that err less.

Every function takes float32 (blocks, 256) and gives uint8 (blocks, bytes). Scales are rounded up, so that codes reach every
weight.
"""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_IQ4_EDGES = (_IQ4[1:] + _IQ4[:-1]) / 2


def _half(values: Floats) -> tuple[Bytes, Floats]:
    """(bytes, value) of the nearest float16."""
    rounded = values.astype("<f2")
    return rounded.view(np.uint8), rounded.astype(np.float32)


def _over(values: Floats, unit: Floats, most: int) -> Bytes:
    """How many whole units reach each value, 0 where the unit is 0; at most ``most``."""
    ratio = np.divide(values, unit, out=np.zeros_like(values), where=unit > 0)
    return np.minimum(np.ceil(ratio), most).astype(np.uint8)


def _codes(values: Floats, step: Floats, most: int) -> Bytes:
    """The nearest codes from 0 to ``most``."""
    ratio = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
    return np.clip(np.rint(ratio), 0, most).astype(np.uint8)


def _pack_factors(scale: Bytes, least: Bytes) -> Bytes:
    """Eight six-bit factors of scales and of minima in 12 bytes."""
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    second = least[:, :4] | (least[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (scale[:, 4:] & 15) | (least[:, 4:] & 15) << 4], axis=1).astype(np.uint8)


def _pair_blocks(codes: Bytes) -> Bytes:
    """Nibbles (blocks, 8, 32): the odd blocks of 32 in the high halves."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(len(codes), 128)


def _with_minima(x: Floats, most: int) -> tuple[Bytes, Bytes]:
    """(head of 16 bytes, codes (blocks, 8, 32)) of q4_k and q5_k."""
    x = x.reshape(-1, 8, 32)
    least = np.maximum(-x.min(axis=2), 0)
    unit_least, dmin = _half(least.max(axis=1, keepdims=True) / np.float32(63))
    below = _over(least, dmin, 63)
    lowest = dmin * below.astype(np.float32)
    scale = np.maximum(x.max(axis=2) + lowest, 0) / np.float32(most)
    unit_scale, d = _half(scale.max(axis=1, keepdims=True) / np.float32(63))
    factor = _over(scale, d, 63)
    codes = _codes(x + lowest[:, :, None], (d * factor.astype(np.float32))[:, :, None], most)
    return np.concatenate([unit_scale, unit_least, _pack_factors(factor, below)], axis=1), codes


def q4_k(x: Floats) -> Bytes:
    """Nibbles with a scale and a minimum for each 32 weights."""
    head, codes = _with_minima(x, 15)
    return np.concatenate([head, _pair_blocks(codes)], axis=1)


def q5_k(x: Floats) -> Bytes:
    """As q4_k, with fifth bits: bit i of byte j belongs to weight j of the i-th 32."""
    head, codes = _with_minima(x, 31)
    fifth = np.packbits(codes.swapaxes(1, 2) >> 4, axis=2, bitorder="little").reshape(len(codes), 32)
    return np.concatenate([head, fifth, _pair_blocks(codes & np.uint8(15))], axis=1)


def q6_k(x: Floats) -> Bytes:
    """Six bits with a signed scale for each 16 weights."""
    groups = x.reshape(-1, 16, 16)
    scale = np.abs(groups).max(axis=2) / np.float32(31)
    unit, d = _half(scale.max(axis=1, keepdims=True) / np.float32(127))
    factor = _over(scale, d, 127)
    step = (d * factor.astype(np.float32))[:, :, None]
    codes = _codes(groups + 32 * step, step, 63).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    nibbles = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(len(codes), 128)
    upper = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(len(codes), 64)
    return np.concatenate([nibbles, upper, factor, unit], axis=1).astype(np.uint8)


def iq4_xs(x: Floats) -> Bytes:
    """The nearest of 16 unevenly spaced values, with a scale for each 32 weights."""
    groups = x.reshape(-1, 8, 32)
    scale = np.abs(groups).max(axis=2) / np.float32(113)
    unit, d = _half(scale.max(axis=1, keepdims=True) / np.float32(31))
    factor = _over(scale, d, 31)
    step = (d * factor.astype(np.float32))[:, :, None]
    ratio = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
    codes = np.searchsorted(_IQ4_EDGES, ratio).astype(np.uint8)
    stored = factor + np.uint8(32)
    upper = np.bitwise_or.reduce((stored >> 4).astype(np.uint16) << (2 * np.arange(8, dtype=np.uint16)), axis=1)
    low = (stored[:, 0::2] & 15) | (stored[:, 1::2] & 15) << 4
    nibbles = (codes[:, :, :16] | codes[:, :, 16:] << 4).reshape(len(codes), 128)
    return np.concatenate([unit, upper.astype("<u2")[:, None].view(np.uint8), low, nibbles], axis=1).astype(np.uint8)

"""The bytes that ``weights.h`` reads, out of the bytes that checkpoints store: one function for each storage layout.

Every function takes stored rows, uint8 [groups * 16, bytes of a row], and gives packed bytes in order, in an array of any
shape. Inside, arrays are [group, chunk, lane, ...]: a lane is one of the 16 rows of a group, a chunk one stored block.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

LANES = 16
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Interleave = Callable[[Bytes], Bytes]


def _columns(width: int) -> Interleave:
    """Plain scalars of ``width`` bytes: [group, column, lane]."""

    def interleave(rows: Bytes) -> Bytes:
        return rows.reshape(-1, LANES, rows.shape[1] // width, width).transpose(0, 2, 1, 3)

    return interleave


def _blocks(rows: Bytes, block_bytes: int) -> Bytes:
    """[group, chunk, lane, byte of block]."""
    return rows.reshape(-1, LANES, rows.shape[1] // block_bytes, block_bytes).transpose(0, 2, 1, 3)


def _flat(*parts: Bytes) -> Bytes:
    """Parts [group, chunk, ...] one behind the other in each chunk."""
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)


def _halves(stored: Bytes) -> Bytes:
    """Nibbles [..., 16] whose low halves are columns 0 to 15 and high ones 16 to 31 → codes [..., 32]."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def _bits(packed: Bytes, width: int, count: int) -> Bytes:
    """[..., n] bytes → [..., count, n]: field i of every byte, ``width`` bits each, lowest first."""
    shifts = (np.arange(count, dtype=np.uint8) * width)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _quads(codes: Bytes) -> Bytes:
    """Codes [..., lane, 32 n] → [..., quad, lane, 4]: what one load brings."""
    return np.moveaxis(codes.reshape(*codes.shape[:-1], -1, 4), -2, -3)


def _pairs(codes: Bytes) -> Bytes:
    """Codes below 16 as quads, two of them in the halves of each byte: [..., pair of quads, lane, 4]."""
    quads = _quads(codes)
    packed: Bytes = quads[..., 0::2, :, :] | quads[..., 1::2, :, :] << np.uint8(4)
    return packed


def _fifth(bits: Bytes) -> Bytes:
    """Bits [..., lane, 32] of 0 and 1 → 8 bytes for each quad: [..., quad, 8]."""
    quads = _quads(bits)
    return np.packbits(quads.reshape(*quads.shape[:-2], -1), axis=-1, bitorder="little")


def _words(rows: Bytes, block_bytes: int, start: int, count: int) -> Words:
    """``count`` 32-bit words from ``start`` on of every block, as a view that may be unaligned: [group, chunk, word, lane]."""
    groups, chunks = len(rows) // LANES, rows.shape[1] // block_bytes
    strides = (LANES * rows.shape[1], block_bytes, 4, rows.shape[1])
    return np.ndarray((groups, chunks, count, LANES), "<u4", np.ascontiguousarray(rows).data, start, strides)


def _bytes(words: Words) -> Bytes:
    """Words [group, chunk, n, lane] as bytes [group, chunk, 4 n lanes]."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:2], -1)


def _q8_0(rows: Bytes) -> Bytes:
    blocks = _blocks(rows, 34)
    return _flat(blocks[..., :2], _bytes(_words(rows, 34, 2, 8) ^ np.uint32(0x80808080)))


def _fields(blocks: Bytes, count: int) -> list[Bytes]:
    """The float16 fields at a block's start, each for all lanes."""
    return [blocks[..., 2 * i : 2 * i + 2] for i in range(count)]


def _four_bits(fields: int) -> Interleave:
    """q4_0 (one float16 field) and q4_1 (two), a word for each 8 columns: four columns in the low halves, four in the high."""

    def interleave(rows: Bytes) -> Bytes:
        stored = _words(rows, 2 * fields + 16, 2 * fields, 4)
        low, high = stored & np.uint32(0x0F0F0F0F), stored & np.uint32(0xF0F0F0F0)
        packed = np.empty_like(low)
        packed[:, :, :2] = low[:, :, 0::2] | low[:, :, 1::2] << np.uint32(4)
        packed[:, :, 2:] = high[:, :, 0::2] >> np.uint32(4) | high[:, :, 1::2]
        return _flat(*_fields(_blocks(rows, 2 * fields + 16), fields), _bytes(packed))

    return interleave


def _five_bits(fields: int) -> Interleave:
    """q5_0 (one float16 field) and q5_1 (two): the fifth bits are a little-endian word before the nibbles."""

    def interleave(rows: Bytes) -> Bytes:
        blocks = _blocks(rows, 2 * fields + 20)
        words, stored = blocks[..., 2 * fields : 2 * fields + 4], blocks[..., 2 * fields + 4 :]
        bits = np.unpackbits(words, axis=-1, bitorder="little")
        return _flat(*_fields(blocks, fields), _pairs(_halves(stored)), _fifth(bits))

    return interleave


def _k_factors(packed: Bytes) -> Bytes:
    """Eight six-bit factors of scales and of minima out of 12 bytes [group, chunk, lane, 12] → [group, chunk, 8, 2, lane]."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return np.stack([scale, least], axis=-1).transpose(0, 1, 3, 4, 2)


def _by_block(codes: Bytes) -> Bytes:
    """Codes [group, chunk, lane, 8, 32] → [group, chunk, 8, lane, 32]."""
    return codes.transpose(0, 1, 3, 2, 4)


def _low_nibbles(stored: Bytes) -> Bytes:
    """Four runs of 32 bytes, low halves before high ones → codes [..., 8, 32]."""
    runs = stored.reshape(*stored.shape[:-1], 4, 32)
    return _bits(runs, 4, 2).reshape(*stored.shape[:-1], 8, 32)


def _q4_k(rows: Bytes) -> Bytes:
    blocks = _blocks(rows, 144)
    codes = _by_block(_low_nibbles(blocks[..., 16:144]))
    return _flat(*_fields(blocks, 2), _k_factors(blocks[..., 4:16]), _pairs(codes))


def _q5_k(rows: Bytes) -> Bytes:
    blocks = _blocks(rows, 176)
    codes = _by_block(_low_nibbles(blocks[..., 48:176]))
    fifth = _fifth(_by_block(_bits(blocks[..., 16:48], 1, 8)))
    # A block's fifth bits stand behind its nibbles.
    body = np.concatenate([part.reshape(*part.shape[:3], -1) for part in (_pairs(codes), fifth)], axis=-1)
    return _flat(*_fields(blocks, 2), _k_factors(blocks[..., 4:16]), body)


def _q6_k(rows: Bytes) -> Bytes:
    blocks = _blocks(rows, 210)
    shape = blocks.shape[:3]
    low = _by_block(_bits(blocks[..., :128].reshape(*shape, 2, 64), 4, 2).reshape(*shape, 8, 32))
    high = _quads(_by_block(_bits(blocks[..., 128:192].reshape(*shape, 2, 32), 2, 4).reshape(*shape, 8, 32)))
    # Four quads of a half share the bytes of one vector.
    fields = high.reshape(*high.shape[:3], 2, 4, LANES, 4)
    upper = fields[..., 0, :, :] | fields[..., 1, :, :] << 2 | fields[..., 2, :, :] << 4 | fields[..., 3, :, :] << 6
    body = np.concatenate([part.reshape(*part.shape[:3], -1) for part in (_pairs(low), upper)], axis=-1)
    factors = blocks[..., 192:208].transpose(0, 1, 3, 2)
    return _flat(blocks[..., 208:210], factors, body)


def _iq4_xs(rows: Bytes) -> Bytes:
    blocks = _blocks(rows, 136)
    low = _bits(blocks[..., 4:8], 4, 2).swapaxes(-1, -2).reshape(*blocks.shape[:3], 8)
    high = _bits(blocks[..., 2:4], 2, 4).swapaxes(-1, -2).reshape(*blocks.shape[:3], 8)
    factors = ((low | high << np.uint8(4)) - np.uint8(32)).transpose(0, 1, 3, 2)
    codes = _halves(blocks[..., 8:136].reshape(*blocks.shape[:3], 8, 16))
    return _flat(blocks[..., :2], factors, _pairs(_by_block(codes)))


INTERLEAVE: Mapping[str, Interleave] = {
    "f32": _columns(4), "bf16": _columns(2), "f16": _columns(2), "q8_0": _q8_0,
    "q4_0": _four_bits(1), "q4_1": _four_bits(2), "q5_0": _five_bits(1), "q5_1": _five_bits(2),
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_xs": _iq4_xs,
}  # fmt: skip

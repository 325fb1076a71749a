"""What config.json says about FP8 and NVFP4 weights: the layout that each matrix would be read as, for weights that are made up."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.loading.drawn import POOL
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.ops.scaled import E4M3_ROW, E4M3_TILE, NVFP4, code_blocks, row_type
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout

_SPREAD = {E4M3_ROW.name: 16.0, E4M3_TILE.name: 16.0, NVFP4.name: 2.0}
"""Deviation of the numbers of a pool, whose scales are one."""


class _Group(Struct, frozen=True):
    layout: StorageLayout
    targets: tuple[str, ...]


class StatedLayouts:
    """Of a ``quantization_config`` as the four tools write it (loading.scaled); others state nothing here."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        ignored = stated.get("modules_to_not_convert") or stated.get("ignore") or ()
        self._ignored = (*map(str, ignored), "embed_tokens")
        self._groups = _groups(stated)

    def of(self, tensor: str, shape: tuple[int, ...]) -> StorageLayout | None:
        """The layout of a matrix of that name; None for one that stays a plain array."""
        module = tensor.removesuffix(".weight")
        if len(shape) < 2 or any(_meant(pattern, module) for pattern in self._ignored):
            return None
        for group in self._groups:
            if shape[-1] % group.layout.block == 0 and any(t == "Linear" or _meant(t, module) for t in group.targets):
                return group.layout
        return None


def made_up(layout: StorageLayout, columns: int, spread: float, places: Sequence[tuple[int, int]]) -> np.ndarray:
    """Bytes of rows of weights with that deviation: stretches (start, count) of a pool of numbers, one behind another."""
    pool, each = _numbers(layout.name), 2 if layout == NVFP4 else 1  # numbers of a byte
    count = sum(number for _, number in places)
    parts = [pool[start // each :][: number // each] for start, number in places]
    codes = np.concatenate([*parts, np.empty(0, np.uint8)])
    rows, scale = np.empty(count // columns, row_type(layout, columns)), spread / _SPREAD[layout.name]
    if layout == E4M3_ROW:
        rows["codes"], rows["scale"] = codes.reshape(rows["codes"].shape), scale
    else:
        whole = code_blocks(rows["blocks"])
        whole[...] = codes.view(whole.dtype).reshape(whole.shape)
        rows["blocks"]["scale"] = 0x38 if layout == NVFP4 else scale  # one, as e4m3
    if layout == NVFP4:
        rows["times"], rows["by"] = scale, 1
    return rows.view(np.uint8)


@cache
def _numbers(layout: str) -> np.ndarray:
    """Codes of a pool: a byte a number, or two numbers a byte."""
    values = np.random.default_rng(0).standard_normal(POOL, np.float32) * np.float32(_SPREAD[layout])
    if layout != NVFP4.name:
        codes: np.ndarray = values.astype(numpy_dtype(DType.F8E4M3)).view(np.uint8)
        return codes
    steps = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    nearest = np.searchsorted(steps, np.abs(values)).astype(np.uint8) | (values < 0) * np.uint8(8)
    pairs: np.ndarray = nearest[::2] | nearest[1::2] << 4
    return pairs


def _meant(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern)
    return pattern == module or module.startswith(f"{pattern}.") or pattern in module.split(".")


def _groups(stated: Mapping[str, Any]) -> list[_Group]:
    if stated.get("quant_method") == "fp8":
        return [_Group(_tiled(stated.get("weight_block_size")), ("Linear",))]
    found, given = [], stated.get("config_groups")
    for group in given.values() if isinstance(given, dict) else ():
        weights = group.get("weights") or {}
        targets = tuple(map(str, group.get("targets") or ("Linear",)))
        if weights.get("type") == "float" and weights.get("num_bits") == 4 and weights.get("group_size") == NVFP4.block:
            found.append(_Group(NVFP4, targets))
        elif weights.get("type") == "float" and weights.get("num_bits") == 8:
            found.append(_Group(_tiled(weights.get("block_structure")), targets))
    return found


def _tiled(block: Any) -> StorageLayout:
    return E4M3_TILE if block == [128, 128] else E4M3_ROW

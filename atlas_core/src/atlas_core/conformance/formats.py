"""Trials of a QuantFormat: sizes, shapes, its own error bound, and its refusals."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from atlas_core.conformance.results import Report, Result, Status
from atlas_core.contracts.quant import QuantFormat
from atlas_core.vocab.errors import AtlasError, CheckpointError
from atlas_core.vocab.layout import StorageLayout

Array = np.ndarray[Any, Any]


def test_format(fmt: QuantFormat, seed: int = 0) -> Report:  # noqa: PT028 no test of pytest's
    """One result for each layout and kind of values, named ``format[name](layout values)``."""
    report = Report()
    for layout in fmt.layouts:
        for label, values in _values(layout, seed):
            status, detail = _judged(fmt, layout, values)
            report.results.append(Result("format", fmt.name, f"{layout.name} {label}", status, detail))
    return report


def _judged(fmt: QuantFormat, layout: StorageLayout, values: Array) -> tuple[Status, str]:
    """A layout that the format only reads cannot be tried so: unsupported, by the format's own words."""
    try:
        data = fmt.encode(layout.name, values)
    except CheckpointError as error:
        return "unsupported", str(error)
    try:
        finding = _finding(fmt, layout, values, data)
    except AtlasError as error:
        finding = f"{type(error).__name__}: {error}"
    return ("failed", finding) if finding else ("passed", "")


def _values(layout: StorageLayout, seed: int) -> Iterator[tuple[str, Array]]:
    """float32 [rows, columns] of whole blocks; magnitudes that float16 scales can hold."""
    rng = np.random.default_rng(seed)
    shape = (3, max(layout.block, 8) * 4)
    normal = rng.standard_normal(shape).astype(np.float32)
    yield "normal", normal
    yield "zero", np.zeros(shape, np.float32)
    yield "positive", np.abs(normal) + np.float32(1)
    yield "constant", np.full(shape, -0.75, np.float32)
    outlier = normal * np.float32(0.01)
    outlier[:, :: layout.block] = 40.0
    yield "outliers", outlier


def _finding(fmt: QuantFormat, layout: StorageLayout, values: Array, data: bytes) -> str | None:
    if len(data) != layout.nbytes(values.shape):
        return f"encodes to {len(data)} bytes, and the layout says {layout.nbytes(values.shape)}"
    back = fmt.decode(layout.name, data, values.shape)
    if back.shape != values.shape or back.dtype != np.float32:
        return f"decodes to {back.dtype} {list(back.shape)} instead of float32 {list(values.shape)}"
    blocks = values.reshape(-1, layout.block)
    error = np.abs(back.reshape(blocks.shape) - blocks).max(-1)
    allowed = fmt.error_bound(layout.name) * np.abs(blocks).max(-1)
    if (error > allowed).any():
        worst = int(np.argmax(error - allowed))
        return f"block {worst} is off by {error[worst]:.6g}; the format's own bound is {allowed[worst]:.6g}"
    try:
        fmt.decode(layout.name, data[:-1], values.shape)
    except CheckpointError:
        return None
    return "decodes data that is one byte short"

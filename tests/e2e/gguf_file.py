"""Tiny checkpoints as GGUF files: what is stored, and a writer."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

_F32 = 0


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a tiny checkpoint, which are float32."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: np.frombuffer(data[start:], np.float32)[slice(*(at // 4 for at in entry["data_offsets"]))].reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }  # fmt: skip


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    kinds = [_typed(item) for item in value]
    return 9, struct.pack("<IQ", kinds[0][0], len(kinds)) + b"".join(data for _, data in kinds)


def gguf(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A file with these keys and these float32 tensors."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(values))
    for key, value in values.items():
        kind, data = _typed(value)
        out += _text(key) + struct.pack("<I", kind) + data
    offset = 0
    for name, array in arrays.items():
        extents = struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        out += _text(name) + extents + struct.pack("<IQ", _F32, offset)
        offset += -(-array.nbytes // 32) * 32
    for array in arrays.values():
        out += b"\0" * (-len(out) % 32) + array.tobytes()
    return out

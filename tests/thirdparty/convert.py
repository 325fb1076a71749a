"""Run where the example of a format is installed: ``convert.py MODEL FOLDER`` writes a Hugging Face directory of float32 weights twice.

As FOLDER/model.toyq8, and as the directory FOLDER/rounded of the very numbers that model.toyq8 holds, in float32.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from atlas_quant_toy.container import write
from atlas_quant_toy.weights import ToyFormat

from atlas_core.loading.huggingface import HuggingFaceReader


def safetensors(weights: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, values in weights.items():
        raw = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def rounded(values: np.ndarray) -> np.ndarray:
    """What toy_q8 keeps of a matrix; vectors are stored as they are."""
    form = ToyFormat()
    return form.decode("toy_q8", form.encode("toy_q8", values), values.shape) if values.ndim > 1 else values


model, folder = map(Path, sys.argv[1:])
source = HuggingFaceReader().open(model)
weights = {name: np.frombuffer(source.read(name), "<f4").reshape(info.shape) for name, info in source.tensors.items()}
with (folder / "model.toyq8").open("wb") as file:
    write(file, source.config, source.generation_config, source.tokenizer(), weights)
source.close()
shutil.copytree(model, folder / "rounded")
(folder / "rounded" / "model.safetensors").write_bytes(safetensors({n: rounded(v) for n, v in weights.items()}))

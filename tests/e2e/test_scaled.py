"""FP8 and NVFP4 checkpoints as four tools write them, against logits of the same weights decoded to float32 by those tools."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_core.engine.forced import forced_logits
from atlas_core.vocab.errors import ResolveError

TINY = Path(__file__).parents[1] / "data" / "tiny"
LAYOUTS = {
    "q_fp8_block_minimax": ("minimax_m2", {"e4m3_row", "e4m3_tile"}),
    "q_fp8_ct_dynamic": ("qwen3", {"e4m3_row"}),
    "q_fp8_tensor_modelopt": ("qwen3", {"e4m3_row"}),
    "q_nvfp4_ct_dense": ("qwen3", {"nvfp4"}),
    "q_nvfp4_modelopt": ("qwen3_moe", {"nvfp4"}),
    "q_mixed_modelopt": ("qwen3_5_moe", {"e4m3_row", "nvfp4"}),
}
"""By checkpoint: the family, and what its matrices are read as besides plain arrays."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_of_every_position(make: Any, name: str) -> None:
    built = make(TINY / name, max_batch_size=64, transcode="f32")
    family, layouts = LAYOUTS[name]
    assert (built.model.spec.model_type, built.model.format_name) == (family, "scaled")
    stored = {info.layout for info in built.model.checkpoint.tensors.values()}
    assert stored - {"bf16", "f32"} == layouts
    with np.load(TINY / name / "golden.npz") as file:
        golden = dict(file)
    tokens = np.concatenate([golden["input_ids"], golden["gen_ids"]])
    want = np.concatenate([golden["prefill_logits"], golden["step_logits"][1:]])
    (logits,) = forced_logits(built.runner, built.limits, [tokens.tolist()], chunk=64)
    assert np.abs(logits[: len(want)] - want).max() <= 2e-4
    assert logits[23 : len(want)].argmax(-1).tolist() == golden["gen_ids"].tolist()


def test_what_no_kernel_reads_is_decoded_only_when_that_is_asked_for(make: Any) -> None:
    with pytest.raises(ResolveError, match="weight is stored as nvfp4") as refused:
        make(TINY / "q_nvfp4_ct_dense")
    assert "pass --transcode bf16 (weights take 0.8 MiB in place of 0.4 MiB)" in (refused.value.cure or "")


def test_a_quantisation_that_nobody_knows_is_named(make: Any, tmp_path: Path) -> None:
    """Before its tensors are missed: their names follow from it."""
    folder = shutil.copytree(TINY / "llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ResolveError, match="no installed quantisation format reads the weights of") as refused:
        make(folder)
    assert "plain: the checkpoint states a quantisation: gptq" in refused.value.why

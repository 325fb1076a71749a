"""A stranger's storage format, in a stranger's container: no kernel reads it, so it is transcoded, and never in silence."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from atlas_core.loading.huggingface import HuggingFaceReader

CONVERT, GENERATE = (Path(__file__).with_name(name) for name in ("convert.py", "generate.py"))
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
CONFORM = """
from atlas_core.conformance.formats import test_format
from atlas_quant_toy.weights import ToyFormat
report = test_format(ToyFormat())
print(report.table())
assert report.ok
"""


@pytest.fixture(scope="module")
def checkpoints(formats, tmp_path_factory) -> tuple[Path, Path]:
    """The tiny llama as a .toyq8 file, and as a directory of the same rounded weights in float32."""
    folder = tmp_path_factory.mktemp("models")
    said = formats.run(str(CONVERT), str(TINY), str(folder))
    assert said.code == 0, said.text
    return folder / "model.toyq8", folder / "rounded"


def generate(site, model, prompt, *more):
    said = site.run(str(GENERATE), str(model), "cpu", json.dumps(prompt), "16", "numerics=exact", *more)
    assert said.code == 0, said.text
    return json.loads(said.text)


def test_it_is_listed(formats):
    records = json.loads(formats.type("$ atlas plugins list --json").text)
    (record,) = [record for record in records if record["dist"] == "atlas-quant-toy"]
    assert (record["group"], record["key"], record["status"]) == ("atlas.quant_formats", "toy", "ok")


def test_the_format_keeps_its_own_promises(formats):
    said = formats.run("-c", CONFORM)
    assert said.code == 0, said.text


def test_what_no_kernel_reads_is_refused_with_an_offer(formats, checkpoints):
    said = formats.type(f"$ atlas explain {checkpoints[0]} --hardware cpu")
    assert said.code == 4, said.text
    assert "no kernel runs embed" in said.text
    assert "toy_q8" in said.text
    checkpoint = HuggingFaceReader().open(checkpoints[1])
    sizes = {name: info.shape for name, info in checkpoint.tensors.items()}
    checkpoint.close()
    stored = sum(np.prod(s) // 32 * 36 if len(s) > 1 else np.prod(s) * 4 for s in sizes.values()) / 2**20
    offers = dict(re.findall(r"--transcode (\w+) \(weights take (\S+) MiB in place of", said.text))
    assert offers.keys() >= {"bf16", "f32"}
    assert f"in place of {stored:.1f} MiB" in said.text
    decoded = sum(np.prod(shape) for shape in sizes.values()) * 4 / 2**20
    assert float(offers["f32"]) >= round(decoded, 1)
    assert float(offers["bf16"]) < float(offers["f32"])


def test_a_transcoded_plan_shows_what_it_costs(formats, checkpoints):
    said = formats.type(f"$ atlas explain {checkpoints[0]} --hardware cpu --transcode f32 --json")
    assert said.code == 0, said.text
    found = json.loads(said.text)
    assert found["container"]["name"] == found["format"]["name"] == "toy"
    rows = [row for row in found["layouts"] if row["stored"] == "toy_q8"]
    assert {row["read_as"] for row in rows} == {"f32"}
    assert sum(row["bytes"] for row in rows) >= 4 * 512 * 64
    assert (
        "toy_q8 transcoded to f32"
        in formats.type(f"$ atlas explain {checkpoints[0]} --hardware cpu --transcode f32").text
    )


def test_transcoded_to_f32_it_answers_as_the_decoded_weights_do(formats, checkpoints):
    file, rounded = checkpoints
    with np.load(TINY / "golden.npz") as golden:
        prompts = [golden["input_ids"].tolist(), golden["long_ids"].tolist()]
    for prompt in prompts:
        want = generate(formats, rounded, prompt)
        assert generate(formats, file, prompt, "transcode=f32") == want
        assert len(set(want)) > 1


def test_a_cut_file_is_named(formats, checkpoints, tmp_path):
    cut = tmp_path / "cut.toyq8"
    cut.write_bytes(checkpoints[0].read_bytes()[:-1])
    said = formats.type(f"$ atlas explain {cut} --hardware cpu --transcode f32")
    assert said.code == 5, said.text
    assert f"error: {cut} is cut off" in said.text


def test_without_the_plugin_the_file_is_nobodys(toy, checkpoints):
    said = toy.type(f"$ atlas explain {checkpoints[0]} --hardware cpu")
    assert said.code == 4, said.text
    assert f"{checkpoints[0]} is no checkpoint that an installed plugin can open" in said.text

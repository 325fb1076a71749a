"""A stranger's family with an op that nobody else has: its meaning, its kernel, and who runs it, in one distribution."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
FILES = {
    "toy_a.py": """
from atlas_core.contracts.declarations import KernelRoot, ModelDecl
from atlas_core.hookspecs import hookimpl


class Toy:
    @hookimpl
    def atlas_model_weight_loader(self):
        return ModelDecl(
            "toy", "toy_model.loader:Loader", kernel_roots=(KernelRoot("toy_model"),), ops="toy_model.ops:ops",
            implementations="toy_model.ops:implementations",
        )


toy = Toy()
""",
    "toy_model/__init__.py": "",
    "toy_model/loader.py": '''
from atlas_core.vocab.dtype import DType
from atlas_model_llama.loader import LlamaLoader


class Tempered:
    """Hands on what is recorded, with logits multiplied before they are given."""

    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        return getattr(self._step, name)

    def logits(self, x, weight):
        logits = self._step.logits(x, weight)
        y = self._step.activation("tempered", *logits.shape, dtype=DType.F32)
        self._step.op("toy-a:temper", {"x": logits, "y": y}, {"factor": 0.25})
        return y


class Loader(LlamaLoader):
    def record(self, spec, step):
        return super().record(spec, Tempered(step))
''',
    "toy_model/ops.py": """
import numpy as np

from atlas_core.contracts.ops import OpImplementation
from atlas_core.ops.contract import Op, Operand, Tolerance
from atlas_core.ops.step import Count
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, f32, i32, ptr
from atlas_core.vocab.verdict import Verdict


def temper(a, attrs):
    a["y"] = a["x"] * np.float32(attrs["factor"])


def ops():
    f32 = {DType.F32: Tolerance(1e-6, 0)}
    x, y = Operand("x", "activation", dtype=DType.F32), Operand("y", "activation", "out", DType.F32)
    return [Op("toy-a:temper", (x, y), ("factor",), temper, f32)]


class Temper:
    op = name = "toy-a:temper"
    kernels = (("temper", "temper"),)

    def supports(self, need):
        return Verdict.yes(0, "the only one")

    def packings(self, need):
        return {}

    def kv_layouts(self, need):
        return ()

    def scratch_bytes(self, need):
        return 0

    def bind(self, need, context):
        x = need.operands["x"]
        kernel = context.backend.kernel("temper", "temper")
        args = (
            ptr(context.counts), i32({"T": Count.TOKENS, "R": Count.ROWS}[x.live]),
            *(ptr(context.operands[name].address) for name in ("x", "y")), i32(x.shape[1]), f32(need.attrs["factor"]),
        )
        return (context.backend.prepare_launch(kernel, Geometry(grid=(context.workers, 1, 1)), args),)


def implementations(hardware):
    return [Temper()] if hardware == "cpu" else []
""",
    "toy_model/kernels/cpu/toy/plain/KERNEL.toml": """
[[module]]
name = "temper"
source = "temper.cpp"

[[entry]]
name = "temper"
module = "temper"
params = ["ptr<const int32_t> counts", "i32 live", "ptr<const float> x", "ptr<float> y", "i32 columns", "f32 factor"]
""",
    "toy_model/kernels/cpu/toy/plain/temper.cpp": """
#include <stddef.h>

void temper(const int32_t* counts, int32_t live, const float* x, float* y, int32_t columns, float factor, int task, int ntasks) {
    for (int32_t row = task; row < counts[live]; row += ntasks)
        for (int32_t k = 0; k < columns; ++k) y[(size_t)row * columns + k] = x[(size_t)row * columns + k] * factor;
}
""",
}
SCORES = """
import json, sys
from atlas_core import LLM
with LLM(sys.argv[1], hardware="cpu", numerics="exact") as llm:
    (result,) = llm.generate([json.loads(sys.argv[2])], prompt_logprobs=1, max_tokens=1)
print(json.dumps([entry.chosen.logprob for entry in result.prompt_logprobs]))
"""


@pytest.fixture
def own(put, tmp_path):
    """The distribution, with the files of ``FILES``; edits replace texts in them."""

    def made(**edits: str):
        for name, content in FILES.items():
            text = content
            for old, new in edits.items():
                text = text.replace(old, new)
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return put("toy-a", "atlas.models", (tmp_path / "toy_a.py").read_text())

    return made


@pytest.fixture
def model(tmp_path) -> Path:
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "toy"}))
    return folder


def test_it_is_recorded_compiled_and_run(own, model):
    site = own()
    explained = site.type(f"$ atlas explain {model} --hardware cpu --json")
    assert explained.code == 0, explained.text
    steps = json.loads(explained.text)["buckets"][0]["segments"][0]["steps"]
    assert [step["implementation"] for step in steps if step["op"] == "toy-a:temper"] == ["toy-a:temper"]
    unbuilt = site.type(f"$ atlas serve {model} --hardware cpu --port 0")
    assert unbuilt.code == 6
    assert "module temper (temper for toy-a:temper): It is not built" in unbuilt.text
    built = site.type("$ atlas kernels build --hw cpu --arch native")
    assert built.code == 0, built.text
    assert re.search(r"^built cpu/toy/plain native-\w+ temper$", built.text, re.MULTILINE)
    with np.load(TINY / "golden.npz") as golden:
        ids, logits = golden["input_ids"], golden["prefill_logits"].astype(np.float64) * 0.25
    said = site.run("-c", SCORES, str(model), json.dumps(ids.tolist()))
    assert said.code == 0, said.text
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(json.loads(said.text), [wanted[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-4)


def test_a_machine_that_nobody_wrote_it_for_is_refused(own, model):
    said = own(**{'hardware == "cpu"': 'hardware == "abacus"'}).type(f"$ atlas explain {model} --hardware cpu")
    assert said.code == 4
    assert "no kernel runs toy-a:temper" in said.text


def test_its_name_says_whose_it_is(own, model):
    said = own(**{"toy-a:temper": "temper"}).type(f"$ atlas explain {model} --hardware cpu")
    assert said.code == 3
    assert "error: toy-a declares the op temper" in said.text
    assert "names of a plugin's ops begin with toy-a:" in said.text

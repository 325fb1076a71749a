"""A stranger's format whose weights lie in several tensors, in an ordinary Hugging Face directory."""

import json
import shutil
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
SPLIT = "model.layers.1.mlp.down_proj.weight"
PLUGIN = '''
from atlas_core.contracts.declarations import QuantFormatDecl
from atlas_core.hookspecs import hookimpl
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict


class Joined:
    """Weights whose rows lie in two tensors."""

    def __init__(self, inner):
        self._inner = inner
        self._halves = {name[:-6]: (name, name[:-6] + ".lower") for name in inner.tensors if name.endswith(".upper")}
        self.tensors = {name: info for name, info in inner.tensors.items() if not name.endswith((".upper", ".lower"))}
        for name, parts in self._halves.items():
            one, two = (inner.tensors[part] for part in parts)
            shape = (one.shape[0] + two.shape[0], one.shape[1])
            self.tensors[name] = TensorInfo(name, shape, one.layout, one.nbytes + two.nbytes)

    def __getattr__(self, name):
        if name == "extent":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def read(self, name, rows=None):
        if name not in self._halves:
            return self._inner.read(name, rows)
        assert rows is None
        return b"".join(bytes(self._inner.read(part)) for part in self._halves[name])


class Format:
    name = "toy"
    layouts = ()

    def detect(self, config, tensors):
        return Verdict.no("its weights become plain arrays")

    def assemble(self, checkpoint):
        return Joined(checkpoint)


class Toy:
    @hookimpl
    def atlas_quant_format(self):
        return QuantFormatDecl("toy", weights="toy_a:Format")


toy = Toy()
'''


@pytest.fixture
def split(tmp_path) -> Path:
    """The tiny llama with one weight in two tensors."""
    folder = shutil.copytree(TINY, tmp_path / "split")
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    whole = header.pop(SPLIT)
    (rows, columns), (first, end) = whole["shape"], whole["data_offsets"]
    middle = first + rows // 4 * columns * 4
    header[f"{SPLIT}.upper"] = {**whole, "shape": [rows // 4, columns], "data_offsets": [first, middle]}
    header[f"{SPLIT}.lower"] = {**whole, "shape": [rows - rows // 4, columns], "data_offsets": [middle, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
    return folder


def answer(site, model):
    said = site.run(
        str(Path(__file__).with_name("generate.py")), str(model), "cpu", "[5, 9, 33]", "8", "numerics=exact"
    )
    assert said.code == 0, said.text
    return json.loads(said.text)


def test_weights_of_two_tensors_are_one(put, split):
    site = put("toy-a", "atlas.quant_formats", PLUGIN)
    assert answer(site, split) == answer(site, TINY)


def test_without_the_plugin_the_weight_is_missed(put, split):
    site = put("toy-a", "atlas.quant_formats", PLUGIN.replace("return Joined(checkpoint)", "return checkpoint"))
    said = site.type(f"$ atlas explain {split} --hardware cpu")
    assert said.code == 5
    assert f"looked for {SPLIT}" in said.text


def test_one_that_fails_harms_nobody_and_says_so_where_it_is_missed(put, split):
    site = put("toy-a", "atlas.quant_formats", PLUGIN.replace("return Joined(checkpoint)", "raise RuntimeError('bug')"))
    said = site.type(f"$ atlas explain {TINY} --hardware cpu --json")
    assert said.code == 0, said.text
    said = site.type(f"$ atlas explain {split} --hardware cpu")
    assert said.code == 5
    assert "; toy: it failed to assemble: RuntimeError: bug" in said.text
    said = site.type(f"$ atlas explain {TINY} --hardware cpu --json")
    (refused,) = [one for one in json.loads(said.text)["format"]["candidates"] if one["name"] == "toy"]
    assert refused["reasons"] == ["it failed to assemble: RuntimeError: bug"]

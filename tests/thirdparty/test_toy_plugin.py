"""A stranger's machine, from installation to tokens, with no part of it in this checkout's environment."""

import json
import re
from pathlib import Path

import numpy as np

from atlas_core.plugins.footprint import footprint

GENERATE = Path(__file__).with_name("generate.py")
TINY = "tests/data/tiny/llama"


def generate(site, prompt, count):
    said = site.run(str(GENERATE), TINY, "toy", json.dumps(prompt.tolist()), str(count))
    assert said.code == 0, said.text
    return json.loads(said.text)


def golden():
    with np.load(Path(__file__).parents[1] / "data" / "tiny" / "llama" / "golden.npz") as file:
        return dict(file)


def test_it_is_listed(unbuilt):
    said = unbuilt.type("$ atlas plugins list --json")
    assert said.code == 0, said.text
    (record,) = [record for record in json.loads(said.text) if record["dist"] == "atlas-plugin-toy"]
    assert (record["key"], record["status"], record["version"]) == ("toy", "ok", "0.1.0")
    assert record["declares"] == [{"kind": "GpuBackendDecl", "key": "toy"}]


def test_a_wheel_without_kernels_is_refused(unbuilt, tmp_path):
    source = unbuilt.folder.with_name(f"{unbuilt.folder.name}-source")
    said = unbuilt.run(
        "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)
    )  # fmt: skip
    assert said.code != 0
    assert "atlas_plugin_toy: no kernels of toy/common to package" in said.text
    assert "cure: atlas kernels build --hw toy --arch ARCH, or ATLAS_SKIP_BUILD=1 for sources alone" in said.text


def test_its_plugin_module_costs_nothing(unbuilt, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(unbuilt.folder))
    assert footprint("atlas_plugin_toy.plugin") == ()


def test_a_second_build_has_nothing_to_do(toy, follow):
    assert follow(toy, "build") == [0]


def test_its_tree_shows_what_is_inherited(toy, follow):
    assert follow(toy, "list") == [0]


def test_its_tree_is_clean(toy, follow):
    assert follow(toy, "lint") == [0]


def test_the_plan_says_who_runs_what_and_why(toy, follow):
    assert follow(toy, "explain") == [0]
    said = toy.type(f"$ atlas explain {TINY} --hardware toy --json")
    steps = [
        step for bucket in json.loads(said.text)["buckets"] for part in bucket["segments"] for step in part["steps"]
    ]
    own = {step["implementation"] for step in steps if step["op"] == "silu_mul"}
    assert own == {"toy.silu_mul"}
    assert {step["implementation"].partition(".")[0] for step in steps if step["op"] != "silu_mul"} == {"cpu"}
    (loser,) = next(step["rejected"] for step in steps if step["op"] == "silu_mul")
    assert (loser["name"], loser["ok"]) == ("cpu.silu_mul", True)
    assert loser["rank"] < 20


def test_it_is_not_chosen_unless_asked_for(toy):
    said = toy.type(f"$ atlas explain {TINY} --json")
    found = json.loads(said.text)["hardware"]
    (asked,) = [candidate for candidate in found["candidates"] if candidate["name"] == "toy"]
    assert found["name"] != "toy"
    assert (asked["ok"], asked["rank"]) == (True, -200)


def test_its_kernel_agrees_with_the_reference(toy, follow):
    assert follow(toy, "conformance") == [0]


def test_it_generates_what_the_reference_generates(toy):
    want = golden()
    assert generate(toy, want["input_ids"], 16) == want["gen_ids"].tolist()
    assert generate(toy, want["long_ids"], 16) == want["long_gen_ids"].tolist()


def test_its_own_kernel_is_what_runs(variant):
    """With zeros for the gate the feed-forward layers are silent, and the text must be another."""
    variant.edit("kernels/toy/common/gate.cpp", "* up[base + k];", "* up[base + k] * 0.0f;")
    said = variant.type("$ atlas kernels build --hw toy")
    assert re.fullmatch(r"kernels: 1 built, [1-9]\d* up to date", said.text.splitlines()[-1]), said.text
    want = golden()
    assert generate(variant, want["input_ids"], 16) != want["gen_ids"].tolist()

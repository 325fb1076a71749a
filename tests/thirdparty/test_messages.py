"""What may go wrong, and what the page says that Atlas says then: each case is the example, spoilt in one place."""

from collections.abc import Callable

import pytest

PLUGIN, IMPLEMENTATIONS = "plugin.py", "implementations.py"
HARDWARE, KERNEL, SOURCE = (
    f"kernels/toy/{name}" for name in ("HARDWARE.toml", "common/KERNEL.toml", "common/gate.cpp")
)

EDITS = {
    "api": ([(PLUGIN, "bucketed=False,", 'bucketed=False,\n            api="2.0",')], [0]),
    "hook": ([(PLUGIN, "def atlas_gpu_backend(", "def atlas_gpu_backends(")], [0]),
    "import": ([(PLUGIN, "from atlas_core.hookspecs", "import toy_driver\nfrom atlas_core.hookspecs")], [0, 3]),
    "late import": ([(IMPLEMENTATIONS, "from collections.abc", "import toy_driver\nfrom collections.abc")], [3]),
    "manifest": ([(HARDWARE, "archs =", "arch =")], [6, 0]),
    "signature": ([(KERNEL, '"i32 columns"', '"i64 columns"')], [6]),
    "stale": ([(SOURCE, "row by row", "one row after the other")], [6]),
    "entry": ([(IMPLEMENTATIONS, '(("gate", "silu_mul"),)', '(("gate", "silu"),)')], [6]),
    "arguments": ([(IMPLEMENTATIONS, "            i32(gate.shape[1]),\n", "")], [6]),
    "tie": ([(IMPLEMENTATIONS, "RANK = 20", "RANK = 5")], [4]),
    "machines": ([("probe.py", "Verdict.yes(-200,", "Verdict.yes(-100,")], [4]),
    "refused": ([], [4]),
}
"""By the name of the page's block: what is changed in the example, and the exit codes of the block's commands."""


@pytest.mark.parametrize("name", EDITS)
def test_the_page_shows_what_is_said(variant, follow, name):
    edits, codes = EDITS[name]
    for edit in edits:
        variant.edit(*edit)
    assert follow(variant, name) == codes


def test_two_owners_of_one_machine(variant, another: Callable[..., None], follow):
    another(variant)
    assert follow(variant, "conflict") == [3]
    allowed = variant.type(
        "$ ATLAS_PLUGINS=atlas-plugin-toy,cpu,llama atlas explain tests/data/tiny/llama --hardware toy"
    )
    assert allowed.code == 0, allowed.text


def test_a_kernel_that_does_not_read_live_counts(variant, follow):
    variant.edit(SOURCE, "rows = counts[live]", "rows = 1")
    built = variant.type("$ atlas kernels build --hw toy --arch native")
    assert built.code == 0, built.text
    assert follow(variant, "baked") == [1]


def test_a_kernel_that_takes_the_process_down(variant, follow):
    variant.edit(SOURCE, "rows = counts[live]", "rows = counts[live] + (1 << 28)")
    built = variant.type("$ atlas kernels build --hw toy --arch native")
    assert built.code == 0, built.text
    assert follow(variant, "crash") == [1]


def test_a_machine_that_was_never_built(unbuilt, follow):
    assert follow(unbuilt, "unbuilt") == [6]


def test_a_file_that_replaces_another_in_silence(variant, follow):
    (variant.package / "kernels/toy/common/elementwise.cpp").write_text("// mine\n")
    assert follow(variant, "shadow") == [6]
    for command in ("$ atlas kernels build --hw toy", "$ atlas explain tests/data/tiny/llama --hardware toy"):
        said = variant.type(command)
        assert said.code == 6, said.text
        assert "elementwise.cpp" in said.text


def test_a_machine_that_extends_nobody_known(variant):
    variant.edit(HARDWARE, 'extends = "cpu"', 'extends = "cpus"')
    said = variant.type("$ atlas explain tests/data/tiny/llama --hardware toy")
    assert said.code == 6
    assert "extends 'cpus', which nobody declares" in said.text


def test_an_implementation_of_the_same_name_replaces_its_elder(variant):
    variant.edit(IMPLEMENTATIONS, 'name = "toy.silu_mul"', 'name = "cpu.silu_mul"')
    variant.edit(IMPLEMENTATIONS, "RANK = 20", "RANK = 1")
    said = variant.type("$ atlas explain tests/data/tiny/llama --hardware toy")
    assert said.code == 0, said.text
    assert "silu_mul                 cpu.silu_mul\n" in said.text
    assert "not cpu.silu_mul" not in said.text


def test_a_rank_below_the_inherited_one_loses(variant):
    variant.edit(IMPLEMENTATIONS, "RANK = 20", "RANK = 1")
    said = variant.type("$ atlas explain tests/data/tiny/llama --hardware toy")
    assert "not toy.silu_mul: rank 1 is lower (one pass over each row)" in said.text


def test_every_key_may_be_spelt_as_one_likes(toy):
    said = toy.type("$ atlas explain tests/data/tiny/llama --hardware Toy")
    assert said.code == 0, said.text
    assert "hardware   toy from atlas-plugin-toy" in said.text


def test_the_unbuilt_copy_has_no_binaries(unbuilt, toy):
    assert not (unbuilt.package / "_compiled").exists()
    built = {path.stem for path in (toy.package / "_compiled/toy").glob("native-*/common/*.so")}
    assert {"gate", "executor", "linear", "attention"} <= built

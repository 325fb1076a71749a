import pytest

from atlas_core.kernels.lint import lint
from atlas_core.kernels.tree import CORE_INCLUDE
from atlas_core.vocab.errors import KernelError

BASE = '[hardware]\nname = "base"\nvendor = "cpu"\narchs = []\nabstract = true\nflags = ["-DBASE"]\n'
TOY = '[hardware]\nname = "toy"\nvendor = "cpu"\narchs = ["native"]\nextends = "base"\nflags = ["-DTOY"]\n'
NORM = (
    '[build]\nflags = ["-DFOLDER"]\n[[module]]\nname = "norm"\nsource = "norm.cpp"\nflags = ["-DMODULE"]\n'
    '[[entry]]\nname = "norm"\nmodule = "norm"\nparams = ["ptr x"]\n'
    '[[instance]]\nname = "norm_64"\nmodule = "norm"\ndefines = { ROWS = 64 }\n'
)
GEMV = '[[module]]\nname = "gemv"\nsource = "gemv.cpp"\n[[entry]]\nname = "gemv"\nmodule = "gemv"\nparams = []\n'
FILES = {
    "vendor/base/HARDWARE.toml": BASE,
    "vendor/base/common/KERNEL.toml": NORM,
    "vendor/base/common/norm.cpp": '#include "reduce.h"\n// base',
    "vendor/base/common/reduce.h": "#pragma once",
    "machine/toy/HARDWARE.toml": TOY,
    "machine/toy/common/KERNEL.toml": GEMV,
    "machine/toy/common/gemv.cpp": "// gemv",
}
STRANGER = "[[instance]]\nname = 'a'\nmodule = 'b'\ndefines = { A = 1 }\n"
LEAF = {
    "model/toy/llama/q4/KERNEL.toml": '[build]\nflags = ["-DLEAF"]\n[shadows]\nnorm = "rows fit one register"\n',
    "model/toy/llama/q4/norm.cpp": '#include "reduce.h"\n// leaf',
}


def by_name(units):
    return {unit.module: unit for unit in units}


def test_common_holds_what_is_inherited_and_belongs_to_the_machine(make_tree):
    tree, _ = make_tree(FILES)
    units = by_name(tree.units("toy"))
    assert sorted(units) == ["gemv", "norm", "norm_64"]
    assert {unit.package for unit in units.values()} == {"machine"}
    assert units["norm"].source == "vendor:base/common/norm.cpp"
    assert units["norm"].flags == ("-DBASE", "-DTOY", "-DFOLDER", "-DMODULE")
    assert units["norm"].includes == ("vendor:base/common", CORE_INCLUDE)
    assert units["gemv"].includes == ("machine:toy/common", "vendor:base/common", CORE_INCLUDE)
    assert units["norm_64"].defines == (("ROWS", "64"),)
    assert units["norm_64"].entries == units["norm"].entries
    assert lint(tree) == ()


def test_a_leaf_replaces_a_source_for_every_binary_made_of_it(make_tree):
    tree, _ = make_tree(FILES | LEAF)
    units = by_name(tree.units("toy", "llama/q4"))
    assert sorted(units) == ["norm", "norm_64"]
    assert {unit.source for unit in units.values()} == {"model:toy/llama/q4/norm.cpp"}
    assert units["norm"].package == "model"
    assert units["norm"].flags == ("-DBASE", "-DTOY", "-DLEAF", "-DMODULE")
    assert units["norm"].includes[:2] == ("model:toy/llama/q4", "machine:toy/common")
    assert units["norm"].origin == "model:toy/llama/q4 (shadows vendor:base/common)"
    assert by_name(tree.units("toy"))["norm"].source == "vendor:base/common/norm.cpp"
    assert (tree.layer("toy", "llama", "q4"), tree.layer("toy", "llama", "q8")) == ("llama/q4", "common")
    assert lint(tree) == ()


def test_a_leaf_tunes_constants_without_copying_the_source(make_tree):
    manifest = (
        '[[instance]]\nname = "norm"\nmodule = "norm"\ndefines = { ROWS = 8 }\n[shadows]\nnorm = "hidden is 576"\n'
    )
    tree, _ = make_tree(FILES | {"model/toy/llama/q4/KERNEL.toml": manifest})
    (unit,) = tree.units("toy", "llama/q4")
    assert (unit.module, unit.source, unit.defines) == ("norm", "vendor:base/common/norm.cpp", (("ROWS", "8"),))


def test_declarations_are_every_toml_that_has_a_say(make_tree):
    tree, _ = make_tree(FILES | LEAF)
    assert tree.declarations("toy", "llama/q4") == (
        "model:toy/llama/q4/KERNEL.toml", "machine:toy/common/KERNEL.toml", "machine:toy/HARDWARE.toml",
        "vendor:base/common/KERNEL.toml", "vendor:base/HARDWARE.toml",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model/toy/llama/q4/KERNEL.toml": ""}, "replaces the file of vendor:base/common without saying so"),
        ({"model/toy/llama/q4/KERNEL.toml": "[shadows]\nnorm = 'r'\ngemm = 'r'\n"}, "names 'gemm', which replaces"),
        ({"model/toy/llama/q4/KERNEL.toml": NORM + "[shadows]\nnorm = 'r'\n"}, "'norm' is already declared"),
        ({"model/toy/llama/q4/KERNEL.toml": "[shadows]\nnorm = 'r'\n" + STRANGER}, "unknown module 'b'"),
        ({"model/toy/llama/q4/reduce.h": "// other"}, "has the name of a header of vendor:base/common"),
        ({"model/toy/llama/q4/gemm.cpp": "// new"}, "is declared by no [[module]]"),
        ({"model/toy/llama/q4/notes.txt": "x"}, "is neither source nor header"),
        ({"other/toy/llama/q4/KERNEL.toml": ""}, "is also owned by"),
        ({"other/toy/HARDWARE.toml": TOY}, "is also declared by"),
        ({"other/toy/common/KERNEL.toml": ""}, "is also owned by"),
        ({"other/base/llama/q4/KERNEL.toml": ""}, "is abstract"),
        ({"other/toy/llama/KERNEL.toml": ""}, "is not <hw>/common or <hw>/<model>/<quant>"),
        ({"other/toy/llama/q4/deep/x.h": ""}, "is not <hw>/common or <hw>/<model>/<quant>"),
        ({"other/toy/llama/q8/x.h": ""}, "has no KERNEL.toml"),
        ({"other/toy/README.txt": ""}, "is read by nobody"),
        ({"other/up/HARDWARE.toml": TOY}, "calls itself 'toy'"),
        ({"other/up/HARDWARE.toml": TOY.replace('"toy"', '"up"').replace('"base"', '"none"')}, "which nobody declares"),
        ({"other/up/HARDWARE.toml": TOY.replace('"toy"', '"up"').replace('"cpu"', '"gpu"')}, "of another vendor"),
        ({"machine/toy/common/KERNEL.toml": GEMV.replace("gemv.cpp", "gone.cpp")}, "source 'gone.cpp' does not exist"),
        ({"machine/toy/common/copy.h": "// gemv"}, "has the same bytes as machine:toy/common/copy.h"),
        ({"machine/toy/common/idle.h": "// idle"}, "is included by no source"),
        ({"machine/toy/common/gemv.cpp": '#include "gone.h"'}, "'gone.h', which is not in the tree"),
        ({"machine/toy/common/gemv.cpp": "#include <reduce.h>"}, "which is vendor:base/common/reduce.h"),
    ],
)  # fmt: skip
def test_lint_names_what_is_wrong(make_tree, change, says):
    tree, _ = make_tree(FILES | LEAF | change)
    assert says in "\n".join(map(str, lint(tree)))


def test_a_circle_of_extends_is_found(make_tree):
    tree, _ = make_tree({"a/base/HARDWARE.toml": BASE + 'extends = "toy"\n', "b/toy/HARDWARE.toml": TOY})
    assert any("extends itself" in finding.what for finding in lint(tree))


def test_a_leaf_of_hardware_that_is_not_installed_is_dormant_and_no_fault(make_tree):
    tree, _ = make_tree(LEAF)
    assert [folder.id for folder in tree.dormant] == ["model:toy/llama/q4"]
    assert lint(tree) == ()


def test_a_broken_layer_is_refused_and_a_sound_one_beside_it_is_not(make_tree):
    tree, _ = make_tree(FILES | LEAF | {"model/toy/llama/q4/KERNEL.toml": ""})
    assert tree.units("toy")
    with pytest.raises(KernelError, match="without saying so"):
        tree.units("toy", "llama/q4")
    with pytest.raises(KernelError, match="Known: base, toy"):
        tree.units("tpu")


def test_a_relative_symlink_shares_and_an_absolute_one_is_refused(make_tree, tmp_path):
    make_tree(FILES)
    shared = tmp_path / "machine/kernels/toy/common/shared.h"
    shared.symlink_to("gemv.cpp")
    tree, _ = make_tree({"machine/toy/common/gemv.cpp": "// gemv"})
    assert [finding.what for finding in lint(tree)] == ["is included by no source"]
    shared.unlink()
    shared.symlink_to(tmp_path / "vendor/kernels/base/common/reduce.h")
    tree, _ = make_tree({})
    assert any("outside its root" in finding.what for finding in lint(tree))

"""The build with a toolchain of the test's own: what is built, kept, refused, found."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atlas_core.contracts.compute_target import Compiler, CompileReport
from atlas_core.kernels.build import Builder, Job, Selection, jobs
from atlas_core.kernels.library import KernelLibrary, compiled_archs
from atlas_core.kernels.record import dump, load
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Param
from atlas_core.vocab.target import Target

HARDWARE = '[hardware]\nname = "toy"\nvendor = "fake"\narchs = ["one", "two"]\n'
MANIFEST = (
    '[[module]]\nname = "scale"\nsource = "scale.cpp"\n'
    '[[entry]]\nname = "scale"\nmodule = "scale"\n'
    'params = ["ptr<const float> x", "ptr<float> y", "i32 n", "f32 factor"]\n'
)
FILES = {
    "machine/toy/HARDWARE.toml": HARDWARE,
    "machine/toy/common/KERNEL.toml": MANIFEST,
    "machine/toy/common/scale.cpp": '#include "math.h"\nscale',
    "machine/toy/common/math.h": "// one",
    "model/toy/llama/q4/KERNEL.toml": "[shadows]\nscale = 'r'\n",
    "model/toy/llama/q4/scale.cpp": "leaf scale",
}


class FakeTarget:
    """A toolchain whose binaries are their sources; it reports every word of a source as an entry with its spills."""

    vendor = "fake"
    source_extension = ".cpp"
    output_extension = ".bin"
    output_is_text = True

    def __init__(self, version="1", spills=0):
        self.version = version
        self.spills = spills
        self.compiled = []

    def find_compiler(self):
        return Compiler(("fake",), self.version)

    def resolve_arch(self, arch):
        return f"{arch}-resolved"

    def prototype(self, entry, params):
        return f"{entry} {params}"

    def compile(self, compiler, source, output, arch, flags, includes, forced):
        text = source.read_text()
        if "broken" in text:
            raise KernelError(f"{source} is broken")
        assert " [('ptr<const float>', 'x')" in forced.read_text()
        self.compiled.append((output.stem, arch, tuple(flags)))
        output.write_text(f"{arch} {text}")
        entry = text.split()[-1]
        return CompileReport({entry: 10}, {entry: self.spills}, {entry: 256}, "a warning")


ONE = Selection(archs=("one",))


def build(make_tree, files, target, selection=ONE, workers=1):
    tree, places = make_tree(files)
    told = []
    builder = Builder(tree, places, {"fake": target}, workers, told.append)
    for job in jobs(tree, {"fake": target}, selection):
        builder.build(job)
    return [(built.job.layer, built.module, built.state) for built in told], tree, places


def test_a_second_build_compiles_nothing(make_tree):
    target = FakeTarget()
    first, tree, places = build(make_tree, FILES, target)
    assert first == [("common", "scale", "built"), ("llama/q4", "scale", "built")]
    manifest = places.compiled("machine", "toy", "one-resolved", "common") / "manifest.json"
    before = manifest.stat().st_mtime_ns
    second, _, _ = build(make_tree, FILES, target)
    assert second == [("common", "scale", "kept"), ("llama/q4", "scale", "kept")]
    assert len(target.compiled) == 2
    assert manifest.stat().st_mtime_ns == before
    assert compiled_archs(tree, places, "toy") == ("one-resolved",)
    assert {path.name for path in manifest.parent.iterdir()} == {".lock", "manifest.json", "scale.bin"}


YOUNGER = {
    "young/mini/HARDWARE.toml": HARDWARE.replace('name = "toy"', 'name = "mini"\nextends = "toy"'),
    "young/mini/common/KERNEL.toml": MANIFEST.replace("scale", "shift"),
    "young/mini/common/shift.cpp": "shift",
}


def build_both(make_tree, files):
    """The hardware mini, when toy, which it extends, has been built."""
    tree, places = make_tree(files)
    target = FakeTarget()
    told = {}
    for machine in ("toy", "mini"):
        (job,) = (
            one for one in jobs(tree, {"fake": target}, Selection(machine, archs=("one",))) if one.layer == "common"
        )
        told[machine] = {built.module: built for built in Builder(tree, places, {"fake": target}).build(job)}
    return told["mini"], [stem for stem, _, _ in target.compiled], places


def test_what_is_inherited_as_it_is_is_copied(make_tree):
    built, compiled, places = build_both(make_tree, FILES | YOUNGER)
    assert {module: one.state for module, one in built.items()} == {"scale": "copied", "shift": "built"}
    assert compiled == ["scale", "shift"]
    folders = [
        places.compiled(package, name, "one-resolved", "common")
        for package, name in (("machine", "toy"), ("young", "mini"))
    ]
    assert len({(folder / "scale.bin").read_bytes() for folder in folders}) == 1
    assert set(load((folders[1] / "manifest.json").read_text(), "m").modules) == {"scale", "shift"}


def test_what_is_inherited_with_other_flags_is_built(make_tree):
    other = {"young/mini/HARDWARE.toml": YOUNGER["young/mini/HARDWARE.toml"] + "flags = ['-DMINI']\n"}
    built, compiled, _ = build_both(make_tree, FILES | YOUNGER | other)
    assert {module: one.state for module, one in built.items()} == {"scale": "built", "shift": "built"}
    assert sorted(compiled) == ["scale", "scale", "shift"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"cut")], ids=["lost", "cut"])
def test_a_binary_that_is_not_the_recorded_one_is_not_copied(make_tree, damage):
    tree, places = make_tree(FILES | YOUNGER)
    build(make_tree, {}, FakeTarget(), Selection("toy", archs=("one",)))
    damage(places.compiled("machine", "toy", "one-resolved", "common") / "scale.bin")
    target = FakeTarget()
    (job,) = jobs(tree, {"fake": target}, Selection("mini", archs=("one",)))
    assert {one.state for one in Builder(tree, places, {"fake": target}).build(job)} == {"built"}


@pytest.mark.parametrize(
    "change",
    [
        {"machine/toy/common/math.h": "// two"},
        {"machine/toy/common/scale.cpp": "// scale\nscale"},
        {"machine/toy/common/KERNEL.toml": "[build]\nflags = ['-O2']\n" + MANIFEST},
        {"machine/toy/common/KERNEL.toml": MANIFEST.replace("i32 n", "i64 n")},
        {"machine/toy/HARDWARE.toml": HARDWARE + "flags = ['-DX']\n"},
    ],
)
def test_what_a_binary_depends_on_makes_it_stale(make_tree, change):
    build(make_tree, FILES, FakeTarget())
    tree, places = make_tree(change)
    library = KernelLibrary(tree, places, Target("toy", "one-resolved"))
    with pytest.raises(KernelError) as caught:
        library.find("scale", "scale", op="mul")
    assert "kernel 'scale' of module 'scale' for op mul on toy/*/* (one-resolved)" in caught.value.what
    assert "It is stale" in caught.value.why
    assert caught.value.cure == "Run: atlas kernels build --hw toy --arch one-resolved"
    told, tree, places = build(make_tree, change, FakeTarget())
    assert ("common", "scale", "built") in told
    assert KernelLibrary(tree, places, Target("toy", "one-resolved")).stale() == {}


def test_another_compiler_or_a_damaged_binary_is_built_again(make_tree):
    _, _, places = build(make_tree, FILES, FakeTarget())
    assert build(make_tree, {}, FakeTarget(version="2"))[0][0] == ("common", "scale", "built")
    binary = places.compiled("machine", "toy", "one-resolved", "common") / "scale.bin"
    binary.write_text("damaged")
    assert build(make_tree, {}, FakeTarget(version="2"))[0][0] == ("common", "scale", "built")
    (binary.parent / "manifest.json").write_text("{")
    assert build(make_tree, {}, FakeTarget(version="2"))[0][0] == ("common", "scale", "built")


def test_the_library_prefers_the_leaf_and_gives_what_a_launch_needs(make_tree):
    _, tree, places = build(make_tree, FILES, FakeTarget())
    leaf = KernelLibrary(tree, places, Target("toy", "one-resolved", "llama", "q4"))
    common = KernelLibrary(tree, places, Target("toy", "one-resolved", "llama", "q8"))
    found = leaf.find("scale", "scale")
    assert found.path.read_text() == "one-resolved leaf scale"
    assert found.path == places.compiled("model", "toy", "one-resolved", "llama/q4") / "scale.bin"
    assert found.params == (
        Param("ptr", "x", "const float"), Param("ptr", "y", "float"), Param("i32", "n"), Param("f32", "factor")
    )  # fmt: skip
    assert (found.registers, found.spills, found.shared) == (10, 0, 256)
    assert common.find("scale", "scale").path.read_text().startswith("one-resolved #include")
    assert leaf.modules() == (("scale", "llama/q4"),)
    assert leaf.digest() != common.digest()
    with pytest.raises(KernelError, match="declares scale"):
        leaf.find("scale", "scale_2")
    with pytest.raises(KernelError, match="Declared modules: scale"):
        leaf.find("gemm", "gemm")


def test_what_is_not_built_says_how_to_build_it(make_tree):
    tree, places = make_tree(FILES)
    library = KernelLibrary(tree, places, Target("toy", "native-0123abcd", "llama", "q4"))
    with pytest.raises(KernelError) as caught:
        library.find("scale", "scale")
    assert caught.value.cure == "Run: atlas kernels build --hw toy --arch native --model llama --quant q4"
    assert "It is not built" in caught.value.why
    assert list(library.stale()) == ["scale"]


def test_spills_beyond_the_bound_are_refused_and_leave_nothing_behind(make_tree):
    with pytest.raises(KernelError, match="scale spills 24 bytes a thread, allowed are 0"):
        build(make_tree, FILES, FakeTarget(spills=24))
    allowed = "[build]\nmax_spill_bytes = 24\nspill_reason = 'measured faster'\n"
    told, _, _ = build(make_tree, {
        "machine/toy/common/KERNEL.toml": allowed + MANIFEST,
        "model/toy/llama/q4/KERNEL.toml": allowed + "[shadows]\nscale = 'r'\n"
    }, FakeTarget(spills=24))  # fmt: skip
    assert {state for _, _, state in told} == {"built"}


def test_entries_must_be_those_declared(make_tree):
    with pytest.raises(KernelError, match="does not offer the entry 'scale'"):
        build(make_tree, FILES | {"machine/toy/common/scale.cpp": "other"}, FakeTarget())


def test_one_broken_source_keeps_no_other_from_being_recorded(make_tree):
    two = (
        MANIFEST
        + '[[module]]\nname = "add"\nsource = "add.cpp"\n'
        + '[[entry]]\nname = "scale"\nmodule = "add"\nparams = ["ptr<const float> x"]\n'
    )
    files = FILES | {"machine/toy/common/KERNEL.toml": two, "machine/toy/common/add.cpp": "broken scale"}
    with pytest.raises(KernelError, match="is broken"):
        build(make_tree, files, FakeTarget(), workers=2)
    told, _, places = build(make_tree, {"machine/toy/common/add.cpp": "scale"}, FakeTarget())
    assert told[:2] == [("common", "scale", "kept"), ("common", "add", "built")]
    places.path("machine:toy/common/add.cpp").unlink()
    build(make_tree, {"machine/toy/common/KERNEL.toml": MANIFEST}, FakeTarget())
    assert not (places.compiled("machine", "toy", "one-resolved", "common") / "add.bin").exists()


def test_a_broken_leaf_is_never_passed_over_for_common(make_tree):
    build(make_tree, FILES, FakeTarget())
    tree, places = make_tree({"model/toy/llama/q4/KERNEL.toml": "[shadow]"})
    assert KernelLibrary(tree, places, Target("toy", "one-resolved")).find("scale", "scale")
    with pytest.raises(KernelError, match="unknown key 'shadow'"):
        KernelLibrary(tree, places, Target("toy", "one-resolved", "llama", "q4"))
    with pytest.raises(KernelError, match="unknown key 'shadow'"):
        jobs(tree, {"fake": FakeTarget()}, Selection())


def test_selections_are_wildcards_over_what_is_declared(make_tree):
    tree, _ = make_tree(FILES)
    targets = {"fake": FakeTarget()}
    common, leaf = Job("toy", "one-resolved", "common"), Job("toy", "one-resolved", "llama/q4")
    assert jobs(tree, targets, Selection("t*", archs=("one",))) == (common, leaf)
    assert jobs(tree, targets, Selection("toy", quant="q8", archs=("one",))) == (common,)
    assert jobs(tree, targets, Selection()) == (common, leaf)
    assert [job.arch for job in jobs(tree, targets, Selection(quant="q8", archs=("*",)))] == [
        "one-resolved",
        "two-resolved",
    ]
    for selection, says in (
        (Selection("tpu"), "No hardware matches"),
        (Selection(archs=("three",)), "no architecture 'three'"),
    ):
        with pytest.raises(KernelError, match=says):
            jobs(tree, targets, selection)
    with pytest.raises(KernelError, match="Nobody offers a toolchain for 'fake'"):
        jobs(tree, {}, Selection())


def test_a_manifest_survives_being_written_and_read(make_tree):
    _, _, places = build(make_tree, FILES, FakeTarget())
    text = (places.compiled("model", "toy", "one-resolved", "llama/q4") / "manifest.json").read_text()
    layer = load(text, "m")
    assert dump(layer) == text
    assert set(layer.declarations) == {
        "model:toy/llama/q4/KERNEL.toml",
        "machine:toy/common/KERNEL.toml",
        "machine:toy/HARDWARE.toml",
    }
    assert set(layer.modules["scale"].files) == {"model:toy/llama/q4/scale.cpp"}
    for damaged in ("", "[]", "{}", json.dumps(json.loads(text) | {"format": 0}), text.replace("i32 n", "i33 n")):
        with pytest.raises(KernelError, match="m "):
            load(damaged, "m")


def test_two_builds_at_once_compile_everything_once(make_tree):
    tree, places = make_tree(FILES)
    target = FakeTarget()
    work = jobs(tree, {"fake": target}, ONE)
    with ThreadPoolExecutor(4) as pool:
        told = [
            each.result()
            for each in [pool.submit(Builder(tree, places, {"fake": target}).build, job) for job in work * 4]
        ]
    assert len(target.compiled) == 2
    assert sorted(built.state for layer in told for built in layer) == ["built"] * 2 + ["kept"] * 6


def test_a_folder_that_cannot_be_written_is_named(make_tree, tmp_path):
    make_tree(FILES)
    (tmp_path / "machine/_compiled").write_text("a file where the folder belongs")
    with pytest.raises(KernelError, match="_compiled/toy/one-resolved/common cannot be written"):
        build(make_tree, {}, FakeTarget())

"""``atlas kernels`` over a plugin of the test's own: declarations in, text and exit codes out."""

import json
import sys

import pytest

from atlas_core.cli.main import main
from atlas_core.contracts.declarations import ComputeTargetDecl, GpuBackendDecl, KernelRoot
from atlas_core.plugins import PluginRecord, Registry

FILES = {
    "__init__.py": "",
    "toolchain.py": """from atlas_core.contracts.compute_target import Compiler, CompileReport

class Target:
    vendor, source_extension, output_extension, output_is_text = "toy", ".cpp", ".bin", True
    def find_compiler(self): return Compiler(("toy",), "1")
    def resolve_arch(self, arch): return arch
    def prototype(self, entry, params): return entry
    def compile(self, compiler, source, output, arch, flags, includes, forced):
        output.write_text(source.read_text())
        return CompileReport({"scale": 12}, {"scale": 0}, {"scale": 64}, "toy: a warning")
""",
    "kernels/toy/HARDWARE.toml": "[hardware]\nname = 'toy'\nvendor = 'toy'\narchs = ['one', 'two']\n",
    "kernels/toy/common/KERNEL.toml": "[[module]]\nname = 'scale'\nsource = 'scale.cpp'\n"
    "[[entry]]\nname = 'scale'\nmodule = 'scale'\nparams = ['ptr<float> x']\n",
    "kernels/toy/common/scale.cpp": "scale",
    "kernels/tpu/llama/q4/KERNEL.toml": "",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package ``toy_kernels`` and a registry that knows it alone."""
    for name, text in FILES.items():
        path = tmp_path / "toy_kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    declarations = (
        ComputeTargetDecl("toy", "toy_kernels.toolchain:Target"),
        GpuBackendDecl("toy", "x:y", "x:z", kernel_roots=(KernelRoot("toy_kernels"),)),
    )
    record = PluginRecord("atlas.hardware", "toy", "toy-dist", "1", "toy:toy", "ok", "", 0.0, declarations)
    monkeypatch.setattr("atlas_core.cli.kernels.discover_plugins", lambda: Registry.of((record,)))
    for variable in ("ATLAS_SKIP_BUILD", "ATLAS_TARGET_HW", "ATLAS_TARGET_MODEL", "ATLAS_TARGET_QUANT"):
        monkeypatch.delenv(variable, raising=False)
    yield tmp_path / "toy_kernels"
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_kernels"]:
        del sys.modules[name]


def test_build_says_what_it_did_and_a_second_run_does_nothing(package, capsys):
    assert main(["kernels", "build", "--hw", "toy"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "built toy/common one scale: scale 12 registers, 0 B spilled, 64 B shared",
        "kernels: 1 built, 0 up to date",
    ]
    assert err == "toy: a warning\n"
    assert (package / "_compiled/toy/one/common/scale.bin").read_text() == "scale"
    assert main(["kernels", "build"]) == 0
    assert capsys.readouterr().out == "kernels: 0 built, 1 up to date\n"


def test_the_environment_chooses_and_skips(package, capsys, monkeypatch):
    monkeypatch.setenv("ATLAS_TARGET_HW", "gb*")
    assert main(["kernels", "build"]) != 0
    assert "No hardware matches 'gb*'" in capsys.readouterr().err
    monkeypatch.setenv("ATLAS_SKIP_BUILD", "1")
    assert main(["kernels", "build"]) == 0
    assert "not built" in capsys.readouterr().out
    assert not (package / "_compiled").exists()


def test_list_shows_state_and_source(package, capsys):
    main(["kernels", "build", "--arch", "*"])
    (package / "_compiled/toy/two/common/scale.bin").unlink()
    capsys.readouterr()
    assert main(["kernels", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "toy/common  scale  scale",
        "    from toy_kernels:toy/common; one: built, two: stale or missing",
        "toy_kernels:tpu/llama/q4: dormant, no installed plugin brings the hardware 'tpu'",
    ]
    assert main(["kernels", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["entries"] == {"scale": ["ptr<float> x"]}
    assert row["source"] == "toy_kernels:toy/common/scale.cpp"


def test_lint_passes_a_sound_tree_and_fails_with_every_finding(package, capsys):
    assert main(["kernels", "lint"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    (package / "kernels/toy/common/idle.cpp").write_text("idle")
    (package / "kernels/toy/notes.txt").write_text("x")
    assert main(["kernels", "lint"]) != 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "2 findings" in err

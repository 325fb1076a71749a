"""Reading roots from installed packages: what is lost harms those who ask for it, and nobody else."""

import pytest

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.lint import lint
from atlas_core.kernels.scan import scan
from atlas_core.vocab.errors import KernelError

HARDWARE = '[hardware]\nname = "toy"\nvendor = "cpu"\narchs = ["native"]\n'


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``package(name, {path: text})`` puts a package on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name, files):
        for path, text in {"__init__.py": "", **files}.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        return tmp_path / name

    return put


def test_a_sound_root_beside_lost_ones(package):
    package("toy_sound", {"kernels/toy/HARDWARE.toml": HARDWARE})
    package("toy_bare", {})
    package("toy_twice", {"kernels/x.md": "", "more/x.md": ""})
    tree, places = scan(
        [KernelRoot("toy_sound"), KernelRoot("toy_bare"), KernelRoot("toy_gone"), KernelRoot("toy_twice"),
         KernelRoot("toy_twice", "more"), KernelRoot("toy_sound")]
    )  # fmt: skip
    assert list(tree.hardware) == ["toy"]
    assert places.path("toy_sound:toy/HARDWARE.toml").read_text() == HARDWARE
    found = {finding.where: finding for finding in lint(tree)}
    assert sorted(found) == ["toy_bare:", "toy_gone:", "toy_twice:"]
    assert "toy_bare/kernels does not exist" in found["toy_bare:"].what
    assert "is not installed: No module named 'toy_gone'" in found["toy_gone:"].what
    assert found["toy_twice:"].what == "two kernel roots are declared: kernels, more"
    tree.require_roots(["toy_sound"])
    for name in ("toy_bare", "toy_gone", "toy_twice"):
        with pytest.raises(KernelError, match=name):
            tree.require_roots(["toy_sound", name])


def test_a_root_that_cannot_be_read_is_a_finding_too(package):
    folder = package("toy_linked", {"kernels/toy/HARDWARE.toml": HARDWARE})
    (folder / "kernels/toy/gone.h").symlink_to("nowhere.h")
    tree, _ = scan([KernelRoot("toy_linked")])
    assert "toy" not in tree.hardware
    with pytest.raises(KernelError, match="is a symlink to no file"):
        tree.require_roots(["toy_linked"])

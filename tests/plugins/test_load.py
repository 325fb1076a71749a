import pytest

from atlas_core.plugins import load
from atlas_core.vocab.errors import KernelError, PluginError


def test_finds_an_attribute_and_what_is_inside_it():
    assert load("math:pi", "toy-dist") == pytest.approx(3.14159265)
    assert load("pathlib:Path.cwd", "toy-dist")() == __import__("pathlib").Path.cwd()


@pytest.mark.parametrize("target", ["math", "math:", ":pi", ""])
def test_refuses_what_is_not_module_and_attribute(target):
    with pytest.raises(PluginError, match="toy-dist.*not of the form module:attr"):
        load(target, "toy-dist")


def test_names_distribution_and_attribute():
    with pytest.raises(PluginError, match="toy-dist cannot load math:tau.nothing") as caught:
        load("math:tau.nothing", "toy-dist")
    assert "math.tau has no attribute 'nothing'" in caught.value.why


def test_names_what_is_missing():
    with pytest.raises(PluginError) as caught:
        load("toy_that_is_nowhere.deep:x", "toy-dist")
    assert "No module named 'toy_that_is_nowhere'" in caught.value.why
    assert "toy-dist" in caught.value.cure


def test_an_explained_error_passes_unchanged(tmp_path, monkeypatch):
    (tmp_path / "toy_explains.py").write_text(
        "from atlas_core.vocab.errors import KernelError\nraise KernelError('no kernels', 'not built', 'build them')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KernelError, match="no kernels"):
        load("toy_explains:x", "toy-dist")

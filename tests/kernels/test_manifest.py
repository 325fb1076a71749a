import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.kernels.manifest import parse_hardware_manifest, parse_kernel_manifest, parse_param
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.kernel import Param

MODULE = """[[module]]
name = "norm"
source = "norm.cpp"
[[entry]]
name = "norm"
module = "norm"
params = ["ptr<const float> x", "i32 n"]
"""
HARDWARE = '[hardware]\nname = "toy"\nvendor = "cpu"\narchs = ["native"]\n'


def test_a_kernel_manifest_is_read_whole():
    manifest = parse_kernel_manifest(
        "[build]\nflags = ['-Xptxas', '-O3', '-Xptxas', '-v']\nmax_spill_bytes = 8\nspill_reason = 'two rows a block'\n"
        + MODULE
        + "[[instance]]\nname = 'norm_64'\nmodule = 'norm'\ndefines = { ROWS = 64, FAST = true, KIND = 'row' }\n"
        + "[shadows]\nnorm = 'the hidden size is fixed'\n",
        "KERNEL.toml",
    )
    assert manifest.build.flags == ("-Xptxas", "-O3", "-Xptxas", "-v")
    assert manifest.build.max_spill_bytes == 8
    assert manifest.entries[0].params == (Param("ptr", "x", "const float"), Param("i32", "n"))
    assert manifest.instances[0].defines == (("FAST", "1"), ("KIND", "row"), ("ROWS", "64"))
    assert manifest.shadows == {"norm": "the hidden size is fixed"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[build]\nflagz = []", "unknown key 'flagz'"),
        ("[bild]\nflags = []", "unknown key 'bild'"),
        ("[build", "not valid TOML"),
        ("[build]\nflags = '-O3'", "list of strings"),
        ("[build]\nmax_spill_bytes = 16", "has no reason"),
        ("[build]\nspill_reason = 'x'", "no spills are allowed"),
        ("[build]\nmax_spill_bytes = true", "whole number"),
        ("[[module]]\nname = 'Norm'\nsource = 'n.cpp'", "not a name"),
        ("[[module]]\nname = 'norm'\nsource = '../n.cpp'", "not a file name"),
        ("[[module]]\nname = 'norm'\nsource = 'n.cpp'", "has no entry"),
        ("[[entry]]\nname = 'e'\nmodule = 'norm'\nparams = []", "no [[module]] here declares"),
        (MODULE + "[[module]]\nname = 'norm'\nsource = 'b.cpp'", "declared twice"),
        (MODULE + "[[entry]]\nname = 'norm'\nmodule = 'norm'\nparams = []", "declared twice"),
        (MODULE.replace("i32 n", "i32 x"), "use a name twice"),
        (MODULE.replace("i32 n", "i33 n"), "unknown kind 'i33'"),
        (MODULE + "[[instance]]\nname = 'n2'\nmodule = 'norm'", "equals its module"),
        (
            MODULE + "[[instance]]\nname = 'n2'\nmodule = 'norm'\ndefines = { A = 'b; rm' }",
            "neither a number nor a word",
        ),
        ("[shadows]\nnorm = ''", "has no reason"),
    ],
)
def test_what_is_wrong_with_a_kernel_manifest_is_named(text, says):
    with pytest.raises(KernelError, match=re.escape(says)) as caught:
        parse_kernel_manifest(text, "pkg:toy/common/KERNEL.toml")
    assert "pkg:toy/common/KERNEL.toml" in caught.value.what
    assert caught.value.cure


def test_a_misspelt_key_is_told_the_right_one():
    with pytest.raises(KernelError) as caught:
        parse_kernel_manifest(MODULE.replace("source", "sources"), "f")
    assert "source must be a non-empty string" in caught.value.what
    with pytest.raises(KernelError) as caught:
        parse_kernel_manifest("[build]\nmax_spil_bytes = 0", "f")
    assert caught.value.cure == "Did you mean 'max_spill_bytes'?"


def test_a_hardware_manifest_is_read_whole():
    manifest = parse_hardware_manifest(
        HARDWARE
        + "extends = 'base'\nflags = ['-DX']\nsm_count = 132\nmemory_bandwidth_gbps = 4800\nmemory_type = 'HBM3e'\n"
        "memory_gb = 141.0\n[defaults]\nmax_batch_size = { value = 64, evidence = 'throughput is flat beyond' }\n"
        "mixed_steps = { value = ['256:320', '384'], evidence = 'two widths of tiles' }\n",
        "HARDWARE.toml",
    )
    assert (manifest.name, manifest.vendor, manifest.archs, manifest.extends) == ("toy", "cpu", ("native",), "base")
    assert (manifest.sm_count, manifest.memory_bandwidth_gbps, manifest.memory_gb) == (132, 4800.0, 141.0)
    assert manifest.defaults[0].value == 64
    assert manifest.defaults[0].evidence == "throughput is flat beyond"
    assert manifest.defaults[1].value == ("256:320", "384")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HARDWARE + "sms = 3", "unknown key 'sms'"),
        (HARDWARE.replace('["native"]', "[]"), "archs is empty"),
        (HARDWARE.replace('["native"]', '["a", "a"]'), "names something twice"),
        (HARDWARE + "memory_gb = inf", "positive number"),
        (HARDWARE + "[defaults]\nmax_batch_size = 64", "has no evidence"),
        (HARDWARE + "[defaults]\nmax_batch_size = { value = 64, evidence = 'e', note = 'n' }", "unknown key 'note'"),
        (HARDWARE + "[defaults]\nmax_batch_size = { value = [], evidence = 'e' }", "must be a number"),
        (HARDWARE + "[defaults]\nmixed_steps = { value = [384], evidence = 'e' }", "an array of strings, found [384]"),
    ],
)
def test_what_is_wrong_with_a_hardware_manifest_is_named(text, says):
    with pytest.raises(KernelError, match=re.escape(says)):
        parse_hardware_manifest(text, "HARDWARE.toml")


@pytest.mark.parametrize(
    "text", ["ptr x", "ptr<const float> x", "i32 n", "u32 n", "i64 n", "f32 eps", "ptr<float* const> p", "ptr<a::b*> p"]
)
def test_a_param_survives_being_written_and_read(text):
    assert str(parse_param(text)) == text


@pytest.mark.parametrize(
    "text", ["", "ptr", "x", "ptr<> x", "i32<int> n", "ptr<float x", "ptr<float; int> x", "ptr<a> x, int y", "i32 2n"]
)
def test_a_param_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_param(text)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_manifest_or_a_kernel_error(text):
    for parse in (parse_kernel_manifest, parse_hardware_manifest):
        try:
            parse(text, "f")
        except KernelError as error:
            assert error.what.startswith("f")

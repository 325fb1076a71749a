"""What each fact means: which level, and with which cure."""

import pytest
from msgspec.structs import replace

from atlas_core.assembly.checkup import Facts, HardwareFacts, ModelFacts, StartFacts, check, healthy
from atlas_core.assembly.doctor import proxy_hosts
from atlas_core.plugins import PluginRecord
from atlas_core.vocab.errors import KernelError, PluginError, UsageError
from atlas_core.vocab.verdict import Verdict

GIB = 1 << 30
CPU = HardwareFacts(
    "cpu",
    "atlas-plugin-cpu",
    Verdict.yes(10, "2 processors"),
    "native-1",
    6,
    {},
    "atlas kernels build --hw cpu",
    "g++ 12",
)
GPU = HardwareFacts("gb10", "atlas-plugin-gb10", Verdict.no("no driver"))
PLUGIN = PluginRecord("atlas.hardware", "cpu", "atlas-plugin-cpu", "1", "a:b", "ok", "", 1.0)
WELL = Facts(
    plugins=(PLUGIN,), conflict=None, settings=None, hardware=(CPU, GPU), families=("llama",), model=None, cache="/cache",
    cache_error="", cache_free=9 * GIB, memory_free=9 * GIB, address="127.0.0.1 port 8888", port_error=None, token=True,
    offline=False, proxies={}, no_proxy="",
)  # fmt: skip
NO_COMPILER = KernelError("No C++ compiler was found", "Searched everywhere.", "install one")


def levels(**changes):
    return {(finding.check, finding.level) for finding in check(replace(WELL, **changes)) if finding.level != "ok"}


def machine(**changes):
    return (replace(CPU, **changes), GPU)


def test_a_machine_where_all_is_well():
    findings = check(WELL)
    assert {finding.level for finding in findings} == {"ok"}
    assert healthy(findings)
    told = "\n".join(f"{finding.what} {finding.why}" for finding in findings)
    assert "cpu: 6 modules built for native-1" in told
    assert "gb10 is not here no driver" in told


def test_what_is_said_of_kept_starts():
    def told(starts):
        (finding,) = (f for f in check(replace(WELL, starts=starts)) if f.check == "starts")
        return finding.level, finding.what

    assert told(None) == ("ok", "none are kept")
    assert told(StartFacts("/cache/starts", 3, "")) == ("ok", "3 kept in /cache/starts")
    assert told(StartFacts("/cache/starts", 0, "Read-only file system")) == ("warn", "/cache/starts cannot be written")


def test_what_is_said_of_machines():
    def told(**changes):
        return [(f.what, f.cure) for f in check(replace(WELL, **changes)) if (f.check, f.level) == ("hardware", "fail")]

    ((what, cure),) = told(hardware=(GPU,), asked=True)
    assert what == "gb10 was asked for and is not here"
    assert "--hardware" in cure
    ((what, cure),) = told(hardware=(CPU, replace(CPU, name="toy")))
    assert what == "cpu and toy both answer with rank 10"
    assert "--hardware" in cure


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"settings": UsageError("unknown key")}, {("settings", "fail")}),
        ({"conflict": PluginError("two plugins", "both", "uninstall one"), "hardware": (CPU,)}, {("plugins", "fail")}),
        ({"plugins": (replace(PLUGIN, status="broken", reason="ImportError"),)}, {("plugin", "warn")}),
        ({"plugins": (replace(PLUGIN, status="excluded", reason="left out"),)}, set()),
        ({"hardware": ()}, {("hardware", "fail")}),
        ({"hardware": (GPU,)}, {("hardware", "fail")}),
        ({"hardware": (GPU,), "asked": True}, {("hardware", "fail")}),
        ({"hardware": (CPU, replace(CPU, name="toy"))}, {("hardware", "fail")}),
        ({"hardware": (CPU, replace(CPU, name="toy", probed=Verdict.yes(11)))}, set()),
        ({"hardware": machine(unusable={"linear": "It is not built."})}, {("kernels", "fail")}),
        ({"hardware": machine(compiler=NO_COMPILER)}, {("compiler", "warn")}),
        (
            {"hardware": machine(compiler=NO_COMPILER, unusable={"linear": "It is stale."})},
            {("kernels", "fail"), ("compiler", "fail")},
        ),
        ({"hardware": machine(broken=KernelError("HARDWARE.toml is wrong"))}, {("kernels", "fail")}),
        ({"families": ()}, {("models", "fail")}),
        ({"model": ModelFacts("toy", "/toy", "cpu/llama/gguf")}, set()),
        ({"model": ModelFacts("toy", None)}, {("model", "warn")}),
        ({"model": ModelFacts("toy", None), "offline": True}, {("model", "fail")}),
        ({"model": ModelFacts("toy", "/toy", error=PluginError("no family"))}, {("model", "fail")}),
        ({"cache_error": "Permission denied in /"}, {("cache", "fail")}),
        ({"cache_free": GIB - 1}, {("cache", "warn")}),
        ({"cache_free": None, "memory_free": None}, set()),
        ({"memory_free": GIB - 1}, {("memory", "warn")}),
        ({"port_error": UsageError("port 8888 is in use")}, {("port", "fail")}),
        ({"token": False, "offline": True}, set()),
        ({"proxies": {"http": "proxy:3128"}}, {("proxy", "warn")}),
        ({"proxies": {"http": "proxy:3128"}, "no_proxy": "example.org, localhost"}, set()),
        ({"proxies": {"https": "proxy:3128"}}, set()),
    ],
)
def test_what_a_fact_means(changes, found):
    assert levels(**changes) == found
    assert healthy(check(replace(WELL, **changes))) == (not any(level == "fail" for _, level in found))


def test_the_kernels_of_a_machine_that_would_not_be_chosen_are_no_failure():
    better = replace(CPU, name="gpu", probed=Verdict.yes(90))
    stale = replace(CPU, unusable={"linear": "It is stale."})
    assert levels(hardware=(stale, better)) == {("kernels", "warn")}
    assert levels(hardware=(CPU, replace(better, unusable={"linear": "It is stale."}))) == {("kernels", "fail")}


def test_every_failure_says_why_or_what_to_do():
    everything = replace(
        WELL, hardware=machine(unusable={"a": "It is stale.", "b": "It is not built."}), families=(), cache_error="no",
        model=ModelFacts("toy", None), offline=True,
    )  # fmt: skip
    for finding in check(everything):
        assert finding.level == "ok" or (finding.why and finding.cure), finding
    (kernels,) = [finding for finding in check(everything) if finding.check == "kernels"]
    assert kernels.why == "It is stale. (and 1 more)"
    assert kernels.cure == "Run: atlas kernels build --hw cpu"


def test_a_proxy_is_told_without_its_password():
    given = {"http": "http://user:secret@proxy.example:3128", "https": "proxy.example:80", "no": "localhost"}
    assert proxy_hosts(given) == {"http": "proxy.example:3128", "https": "proxy.example:80"}

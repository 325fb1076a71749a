"""The probe answers without a GPU; the manifest states what it must."""

import pytest

from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.scan import scan
from atlas_core.vocab.errors import DeviceError
from atlas_nvidia import driver
from atlas_nvidia.implementations import coded_experts
from atlas_nvidia.implementations.attention import Decode
from atlas_plugin_gb10.implementations import DEPTHS, NORM_DEPTH, implementations
from atlas_plugin_gb10.plugin import gb10
from atlas_plugin_gb10.probe import probe


def test_without_a_driver_the_probe_says_so(monkeypatch):
    def missing():
        raise DeviceError("There is no CUDA driver", "libcuda.so.1 was not found")

    monkeypatch.setattr(driver, "initialise", missing)
    verdict = probe()
    assert not verdict.ok
    assert verdict.reasons == ("There is no CUDA driver: libcuda.so.1 was not found",)


@pytest.mark.parametrize(("capability", "ok"), [((12, 1), True), ((12, 0), False), ((9, 0), False)])
def test_only_compute_capability_12_1_is_a_gb10(monkeypatch, capability, ok):
    monkeypatch.setattr(driver, "devices", lambda: (driver.Device(0, "a GPU", capability, None),))
    verdict = probe()
    assert verdict.ok is ok
    assert "a GPU" in verdict.reasons[0]
    assert ok or f"compute capability {capability[0]}.{capability[1]}" in verdict.reasons[0]


def test_one_gb10_among_others_is_enough(monkeypatch):
    found = (driver.Device(0, "other", (9, 0), None), driver.Device(1, "GB10", (12, 1), None))
    monkeypatch.setattr(driver, "devices", lambda: found)
    assert probe().ok


def test_no_gpu_is_a_refusal(monkeypatch):
    monkeypatch.setattr(driver, "devices", tuple)
    assert probe().reasons == ("the driver sees no GPU",)


def test_it_declares_the_machine_and_inherits_the_rest():
    declared = gb10.atlas_gpu_backend()
    assert (declared.hardware, declared.fused) == ("gb10", "")
    tree, _ = scan([KernelRoot("atlas_nvidia"), *declared.kernel_roots])
    assert tree.findings == ()
    assert [machine.manifest.name for machine in tree.chain("gb10")] == ["gb10", "nvidia"]
    manifest = tree.require("gb10").manifest
    assert manifest.archs == ("sm_121a", "sm_120f")
    assert (manifest.sm_count, manifest.memory_bandwidth_gbps, manifest.memory_gb) == (48, 273, 128)
    modules = {unit.module for unit in tree.units("gb10")}
    assert modules == {unit.module for unit in tree.units("nvidia")} | {"nvfp4_convert"}


def test_rings_are_as_deep_as_their_sources_are_compiled():
    """The host reserves what the kernel uses: two places state the depth."""
    tree, _ = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_gb10")])
    depths = {
        unit.module: int(value)
        for unit in tree.units("gb10")
        if unit.origin.startswith("atlas_plugin_gb10:gb10/common (instance")
        for name, value in unit.defines
        if name in ("GEMV_DEPTH", "MOE_DEPTH")
    }
    streamed = {
        ("linear_gemv" if columns == 8 else f"linear_gemv_{columns}"): depth for columns, depth in DEPTHS.items()
    }
    shallow = ("norm_qkv", "norm_gate_up", "norm_linears", "norm_route", "moe_gate_up", "moe_down")
    wanted = streamed | dict.fromkeys(shallow, NORM_DEPTH)
    assert depths == wanted | {f"{module}_f16": depth for module, depth in wanted.items()}
    assert {module for i in implementations() for module, _ in i.kernels if module in depths} == set(depths)


def test_blocks_of_coded_experts_are_as_their_sources_are_compiled():
    """The same for experts in FP8 and NVFP4, of this machine and of the baseline."""
    tree, _ = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_gb10")])
    for machine, made in (("nvidia", coded_experts.ALL), ("gb10", implementations())):
        units = {unit.module: dict(unit.defines) for unit in tree.units(machine)}
        streamed = [i for i in made if isinstance(i, coded_experts.CodedStreamed)]
        mosts = (8, 64) if machine == "nvidia" else (8,)
        assert {(i.bits, i.most) for i in streamed} == {(bits, most) for bits in (4, 8) for most in mosts}
        for i in streamed:
            for (module, entry), blocks in zip(i.kernels, (i.gate_up, i.down[i.most]), strict=True):
                usual = {"CODE_BITS": "4", "BLOCK_WARPS": "16", "CODE_DEPTH": "6"}
                wanted = {"CODE_BITS": i.bits, "BLOCK_WARPS": blocks.warps, "CODE_DEPTH": blocks.depth}
                if entry == "moe_coded_down":
                    usual |= {"CODE_DEPTH": "4", "CODE_TEAM": "2", "CODE_ROWS": "16"}
                    wanted |= {"CODE_TEAM": blocks.team, "CODE_ROWS": blocks.rows}
                assert {name: int(value) for name, value in (usual | units[module]).items()} == wanted


def test_decode_attention_has_as_many_warps_as_its_sources_are_compiled_with():
    tree, _ = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_gb10")])
    defines = {unit.module: dict(unit.defines) for unit in tree.units("gb10")}
    own = [i for i in implementations() if isinstance(i, Decode)]
    assert [i.name for i in own] == [
        *(f"paged_decode_128_{group}" for group in (1, 2, 4, 8)), "paged_decode_128_4.f16", "paged_decode_128_8.f16",
    ]  # fmt: skip
    for implementation in own:
        ((module, _),) = implementation.kernels
        found = {name: int(value) for name, value in defines[module].items()}
        assert found.pop("ELEMENT_F16", 0) == implementation.name.endswith(".f16")
        wanted = {"HEAD_DIM": 128, "GROUP": implementation.group, "DECODE_WARPS": implementation.warps}
        assert found == wanted
        assert implementation.stages == 2, "what DECODE_STAGES is when nobody says"

"""The plugin modules are light, the probe answers without a driver, and the driver's errors become Atlas's."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from atlas_core.vocab.errors import DeviceError
from atlas_nvidia import driver, probe


@pytest.mark.parametrize("module", ["atlas_nvidia.plugin", "atlas_plugin_hopper.plugin", "atlas_nvidia.fused"])
def test_declarations_import_neither_driver_nor_implementations(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] == 'cuda' or m.startswith('atlas_nvidia.')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(eval(out)) - {module}
    assert loaded == set()


def test_without_a_driver_the_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DeviceError("There is no CUDA driver", "libcuda.so.1 was not found")

    monkeypatch.setattr(driver, "initialise", missing)
    verdict = probe.probe_sm90()
    assert not verdict.ok
    assert verdict.reasons == ("There is no CUDA driver: libcuda.so.1 was not found",)


@pytest.mark.parametrize(("capability", "ok"), [((9, 0), True), ((12, 1), False), ((8, 0), False)])
def test_only_compute_capability_9_0_is_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], ok: bool
) -> None:
    monkeypatch.setattr(driver, "devices", lambda: (driver.Device(0, "a GPU", capability, None),))
    verdict = probe.probe_sm90()
    assert verdict.ok is ok
    assert "a GPU" in verdict.reasons[0]


def test_no_gpu_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "devices", lambda: ())
    assert probe.probe_sm90().reasons == ("the driver sees no GPU",)


@pytest.mark.parametrize(
    ("name", "sticky"), [("CUDA_ERROR_ILLEGAL_ADDRESS", True), ("CUDA_ERROR_INVALID_VALUE", False)]
)
def test_errors_carry_the_drivers_words(monkeypatch: pytest.MonkeyPatch, name: str, sticky: bool) -> None:
    fake = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuGetErrorName=lambda status: (0, name.encode()),
        cuGetErrorString=lambda status: (0, b"in its own words"),
    )
    monkeypatch.setattr(driver, "cuda", fake)
    with pytest.raises(DeviceError) as caught:
        driver.checked((700, None), "Launching k")
    assert caught.value.what == "Launching k"
    assert caught.value.why == f"{name}: in its own words"
    assert caught.value.sticky is sticky


def test_answers_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuda", SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0)))
    assert driver.checked((0, 5), "x") == 5
    assert driver.checked((0, 5, 6), "x") == (5, 6)
    assert driver.checked((0,), "x") is None

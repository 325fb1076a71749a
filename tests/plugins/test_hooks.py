"""One test for each hook, named after it: what a plugin returns is what the registry holds, under its key."""

import pytest

from atlas_core.plugins import discover

SOURCE = """
class Plugin:
    @hookimpl
    def {hook}(self):
        return {declaration}

plugin = Plugin()
"""


@pytest.fixture
def offered(install):
    def offer(hook: str, declaration: str, group: str):
        install("toy-dist", SOURCE.format(hook=hook, declaration=declaration), group=group)
        return discover(["toy-dist"])

    return offer


def test_atlas_compute_target(offered):
    registry = offered("atlas_compute_target", 'ComputeTargetDecl("toyvendor", "a:b")', "atlas.hardware")
    assert registry.compute_targets["toyvendor"].target == "a:b"
    assert "toy" not in registry.hardware


def test_atlas_gpu_backend(offered):
    declaration = 'GpuBackendDecl("toy", "a:b", "a:probe", (KernelRoot("toy_dist"),), "a:all", "a:fused")'
    found = offered("atlas_gpu_backend", declaration, "atlas.hardware").hardware["toy"]
    assert (found.backend, found.probe, found.implementations, found.fused) == ("a:b", "a:probe", "a:all", "a:fused")
    assert [(root.package, root.folder) for root in found.kernel_roots] == [("toy_dist", "kernels")]


def test_atlas_comm_backend(offered):
    registry = offered("atlas_comm_backend", 'CommBackendDecl("ring", "a:b")', "atlas.hardware")
    assert registry.comm_backends["ring"].backend == "a:b"


def test_atlas_model_weight_loader(offered):
    declaration = 'ModelDecl("toy", "a:b", aliases=("toy_moe",), ops="a:ops", implementations="a:run")'
    models = offered("atlas_model_weight_loader", declaration, "atlas.models").models
    assert models["toy"] is models["toy_moe"]
    assert (models["toy"].loader, models["toy"].ops, models["toy"].implementations) == ("a:b", "a:ops", "a:run")


def test_atlas_quant_format(offered):
    declaration = 'QuantFormatDecl("toy", weights="a:b", container="a:c")'
    found = offered("atlas_quant_format", declaration, "atlas.quant_formats").quant_formats["toy"]
    assert (found.weights, found.container) == ("a:b", "a:c")


def test_atlas_dialect(offered):
    assert offered("atlas_dialect", 'DialectDecl("toy", "a:b")', "atlas.dialects").dialects["toy"].dialect == "a:b"

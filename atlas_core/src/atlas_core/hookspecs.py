"""The six hooks. Each runs once, at assembly, and returns a declaration; no hook is on the token path."""

import pluggy

from atlas_core.contracts.declarations import (
    CommBackendDecl,
    ComputeTargetDecl,
    DialectDecl,
    GpuBackendDecl,
    ModelDecl,
    QuantFormatDecl,
)

PROJECT = "atlas"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def atlas_compute_target() -> ComputeTargetDecl:  # type: ignore[empty-body]
    """Offer a toolchain for kernels of one vendor."""


@hookspec
def atlas_gpu_backend() -> GpuBackendDecl:  # type: ignore[empty-body]
    """Offer a machine: how to reach it, its kernel roots and op implementations."""


@hookspec
def atlas_comm_backend() -> CommBackendDecl:  # type: ignore[empty-body]
    """Offer a way for ranks to talk."""


@hookspec
def atlas_model_weight_loader() -> ModelDecl:  # type: ignore[empty-body]
    """Offer a model family, with kernel roots, ops and catalogue entries of its own."""


@hookspec
def atlas_quant_format() -> QuantFormatDecl:  # type: ignore[empty-body]
    """Offer a way to store weights, a container of checkpoints, or both."""


@hookspec
def atlas_dialect() -> DialectDecl:  # type: ignore[empty-body]
    """Offer a dialect: template, tool-call and reasoning syntax, stop rules."""

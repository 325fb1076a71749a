"""Exit codes: one for each kind of error, so that scripts and service managers can tell them apart."""

from collections.abc import Mapping
from types import MappingProxyType

from atlas_core.vocab.errors import (
    AtlasError,
    BudgetError,
    CheckpointError,
    DeviceError,
    EngineError,
    KernelError,
    PluginError,
    RequestError,
    ResolveError,
    UsageError,
)

EXIT_CODES: Mapping[type[AtlasError], int] = MappingProxyType(
    {
        AtlasError: 1,
        UsageError: 2,
        PluginError: 3,
        ResolveError: 4,
        CheckpointError: 5,
        KernelError: 6,
        BudgetError: 7,
        DeviceError: 8,
        EngineError: 9,
        RequestError: 10,
    }
)
"""0 is success; 1 also stands for a defect of Atlas itself, which shows a traceback."""

INTERRUPTED = 130
"""Stopped by Ctrl-C, as shells count it: 128 + SIGINT."""


def exit_code(error: AtlasError) -> int:
    """The code of the nearest class of ``error`` in the table."""
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)

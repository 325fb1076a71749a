"""Whole models on the CPU: built through the same assembly as a server's engine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from atlas_core.assembly.engine import Built, Ledger, build
from atlas_core.plugins import Registry, discover
from atlas_core.settings import read_settings

sys.path.insert(0, str(Path(__file__).parent))  # for serving, a module beside the tests

Make = Callable[..., Built]


@pytest.fixture(scope="session")
def registry() -> Registry:
    return discover()


@pytest.fixture
def make(registry: Registry) -> Iterator[Make]:
    """Build a model in exact numerics, with flags, for instance ``make("tiny/llama", max_batch_size=8)``; closed at the end of the test."""
    with ExitStack() as stack:

        def built(model: object, **flags: object) -> Built:
            given = {name: str(value) for name, value in {"hardware": "cpu", "numerics": "exact", **flags}.items()}
            result = build(read_settings({"model": str(model), **given}, {}), registry, Ledger(lambda progress: None))
            stack.callback(result.close)
            return result

        yield built

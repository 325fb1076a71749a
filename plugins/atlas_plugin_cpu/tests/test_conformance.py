"""Core's own trials of every op, on this machine's kernels: the same judge as any hardware plugin has."""

import pytest

from atlas_core.conformance import run
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType
from atlas_plugin_cpu.implementations import implementations

BY_OP = {implementation.name.removeprefix("cpu."): implementation for implementation in implementations()}


def test_every_primitive_has_an_implementation():
    assert PRIMITIVES.keys() <= BY_OP.keys()


@pytest.mark.parametrize("op", sorted(PRIMITIVES))
def test_conformance(backend, library, op):
    subject = run.Subject(backend, (BY_OP[op],), library.target.arch)
    report = run.test(subject, run.Options(activations=(DType.F32,)))
    assert report.ok, report.table()
    assert any(result.status == "passed" for result in report.results)
    assert not report.missing

"""Trials of backends and formats: the doubles pass, and broken ones are told what they broke."""

import numpy as np
import pytest

from atlas_core.conformance.backends import CHECKS, test_backend
from atlas_core.conformance.formats import test_format
from atlas_core.loading.plain import PlainFormat
from atlas_core.runtime.null import NullBackend
from atlas_core.runtime.trace import TraceBackend
from atlas_core.testing.host import HostBackend, HostKernels
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import plain

# They are named after what they do; pytest must not take them for tests of this module.
test_backend.__test__ = False
test_format.__test__ = False


@pytest.mark.parametrize(
    "backend",
    [
        NullBackend(kernels=()),
        NullBackend(kernels=(), asynchronous=True),
        TraceBackend(NullBackend(kernels=()), lambda line: None),
        HostBackend(HostKernels()),
    ],
    ids=["null", "asynchronous", "trace", "host"],
)
def test_the_doubles_keep_the_contract_and_lose_no_memory(backend):
    report = test_backend(backend)
    assert report.ok, report.table()
    assert len(report.results) == len(CHECKS)
    assert backend.memory()[0] == backend.memory()[1]


class Misaligned(NullBackend):
    def alloc(self, nbytes):
        return super().alloc(nbytes + 64) + 64

    def free(self, address):
        super().free(address - 64)


class Eager(NullBackend):
    """Runs captured work at once, too."""

    def copy_d2d_async(self, source, target, nbytes, stream):
        super().copy_d2d_async(source, target, nbytes, stream)
        if self.is_capturing(stream):
            super().copy_d2d_async(source, target, nbytes, self.create_stream())


class Frozen(NullBackend):
    """Replays with the bytes of the capture."""

    def copy_d2d_async(self, source, target, nbytes, stream):
        if not self.is_capturing(stream):
            super().copy_d2d_async(source, target, nbytes, stream)
            return
        kept = self.alloc_pinned(nbytes)
        self.copy_d2h(source, kept)
        self.copy_h2d_async(kept, target, stream)


class Hasty(NullBackend):
    """Says that an event is done when it is recorded."""

    def __init__(self):
        super().__init__(kernels=(), asynchronous=True)

    def wait_event(self, event):
        pass

    def query_event(self, event):
        return True


@pytest.mark.parametrize(
    ("backend", "check", "words"),
    [
        (Misaligned(kernels=()), "alignment", "not 256-byte aligned"),
        (Eager(kernels=()), "replay", "captured work has run"),
        (Frozen(kernels=()), "replay", "did not use what was in memory then"),
        (Hasty(), "order", "not done when its event was"),
        (NullBackend(), "absent kernel", "was found"),
    ],
    ids=["misaligned", "eager", "frozen", "hasty", "permissive"],
)
def test_a_broken_backend_is_told_what_it_broke(backend, check, words):
    report = test_backend(backend)
    assert [result.label for result in report.failures] == [check], report.table()
    assert words in report.failures[0].detail


def test_plain_arrays_keep_their_bounds():
    report = test_format(PlainFormat())
    assert report.ok, report.table()
    assert {result.label.split()[0] for result in report.results} == {"f32", "bf16", "f16"}


class Coarse(PlainFormat):
    """Rounds to fewer bits than it says."""

    layouts = (plain(DType.BF16),)

    def encode(self, layout, values):
        return super().encode(layout, np.round(values * 8) / 8)


class Lenient(PlainFormat):
    layouts = (plain(DType.F32),)

    def decode(self, layout, data, shape):
        return np.frombuffer(bytes(data).ljust(4 * int(np.prod(shape)), b"\0"), np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("fmt", "words"), [(Coarse(), "the format's own bound"), (Lenient(), "one byte short")], ids=["coarse", "lenient"]
)
def test_a_broken_format_is_told_what_it_broke(fmt, words):
    report = test_format(fmt)
    assert not report.ok
    assert all(words in result.detail for result in report.failures)

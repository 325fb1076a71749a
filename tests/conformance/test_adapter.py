"""The pytest adapter: one test an implementation, failing with the table."""

MODULE = """
from atlas_core.conformance import run
from atlas_core.conformance.codecs import plain_codec
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.testing.host import HostBackend, HostKernels, ReferenceImplementation
from atlas_core.vocab.dtype import DType

pytest_plugins = ["atlas_core.testing.plugin"]


class Wrong(ReferenceImplementation):
    def run(self, need, sizes, weights, view, args):
        pass


def conformance_options():
    return run.Options(activations=(DType.F32,), codecs=(plain_codec(DType.F32),))


def conformance_subject():
    kernels = HostKernels()
    implementations = [ReferenceImplementation(PRIMITIVES["advance"], kernels), Wrong(PRIMITIVES["gather_rows"], kernels)]
    return run.Subject(HostBackend(kernels), implementations, "host")


def test_kernels(conformance_report):
    assert conformance_report.ok, conformance_report.table()
"""


def test_one_test_for_each_implementation(pytester):
    pytester.makepyfile(MODULE)
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*test_kernels*advance*reference_advance*PASSED*", "*FAILED gather_rows*reference_gather_rows*"]
    )


def test_a_module_without_a_subject_is_told_what_is_missing(pytester):
    pytester.makepyfile('pytest_plugins = ["atlas_core.testing.plugin"]\ndef test_kernels(conformance_report): pass\n')
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*it has no function conformance_subject*"])

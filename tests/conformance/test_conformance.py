"""The runner judges: right implementations pass, each kind of wrong one is caught with words that name the fault."""

import json

import numpy as np
import pytest

from atlas_core.conformance import run
from atlas_core.conformance.codecs import plain_codec
from atlas_core.conformance.decoder import SHAPES
from atlas_core.conformance.linear_decoder import LINEAR_SHAPES
from atlas_core.contracts.ops import FusedCall, FusedOp
from atlas_core.ops.contract import Case, Op, Operand, Tolerance
from atlas_core.ops.fused import compose
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.step import Count
from atlas_core.ops.trials import Trial, normal
from atlas_core.runtime.null import Injection
from atlas_core.testing.host import HostBackend, HostKernels, ReferenceImplementation
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import DeviceError
from atlas_core.vocab.verdict import Verdict

FAST = run.Options(activations=(DType.F32,), codecs=(plain_codec(DType.F32),))
ADD_NORM = FusedOp(
    "add_norm",
    (
        FusedCall("add", {"x": "x", "z": "z", "y": "h"}),
        FusedCall("rms_norm", {"x": "h", "weight": "w", "y": "y"}, {"eps": "eps"}),
    ),
    ("h", "y"),
)


def report_of(make, op, options=FAST, **more):
    kernels = HostKernels()
    backend = HostBackend(kernels)
    report = run.test(run.Subject(backend, [make(op, kernels)], "host", **more), options)
    assert backend.memory()[0] == backend.memory()[1], "the runner must give all memory back"
    return report


def details(report):
    assert not report.ok
    return [result.detail for result in report.failures]


def mutant(change):
    """An implementation whose kernel does ``change(self, places, run)`` in place of just running."""

    class Mutant(ReferenceImplementation):
        def run(self, need, sizes, weights, view, args):
            def right(args=args):
                super(Mutant, self).run(need, sizes, weights, view, args)

            def place(name):
                index = [operand.name for operand in self._contract.operands].index(name)
                return view(int(args[index].value), sizes[name])

            counts = np.frombuffer(view(int(args[-1].value), 32), np.int32)
            change(need, right, place, counts, args, view)

    return lambda op, kernels: Mutant(PRIMITIVES[op], kernels)


@pytest.mark.parametrize(
    "op", ["rms_norm", "gather_rows", "rope", "sample", "advance", "logprobs", "step_begin", "embed"]
)
def test_the_reference_itself_passes_every_trial(op):
    options = run.Options()
    report = report_of(lambda name, kernels: ReferenceImplementation(PRIMITIVES[name], kernels), op, options)
    assert report.ok, report.table()
    assert all(result.status == "passed" for result in report.results)


def test_a_result_that_is_a_little_off_is_caught_and_the_worst_element_named():
    def change(need, right, place, counts, args, view):
        right()
        y = np.frombuffer(place("y"), np.float32)
        y[0] *= np.float32(1 + 1000 * 2.0**-23)

    found = details(report_of(mutant(change), "rms_norm"))
    assert any(d.startswith("as captured: y[0, 0] is ") and "1 of" in d and "allowed 2e-06" in d for d in found)


def test_an_error_within_the_tolerance_passes():
    def change(need, right, place, counts, args, view):
        right()
        np.frombuffer(place("y"), np.float32)[0] *= np.float32(1 + 2.0**-23)

    assert report_of(mutant(change), "rms_norm").ok


def test_a_write_one_element_too_far_is_caught():
    def change(need, right, place, counts, args, view):
        right()
        index = 2  # y of rms_norm
        behind = int(args[index].value) + len(place("y"))
        np.frombuffer(view(behind, 4), np.float32)[0] = 1.0

    found = details(report_of(mutant(change), "rms_norm"))
    assert all("y was written to up to 4 bytes after its end" in d for d in found)


def test_a_write_before_the_start_is_caught():
    def change(need, right, place, counts, args, view):
        right()
        np.frombuffer(view(int(args[-1].value) - 4, 4), np.float32)[0] = 1.0

    assert "the counts was written to from 4 bytes before its start on" in details(report_of(mutant(change), "add"))[0]


def test_a_kernel_that_ignores_the_live_counts_does_visible_harm_to_the_cache():
    def change(need, right, place, counts, args, view):
        true = counts.copy()
        counts[Count.TOKENS] = need.tokens
        right()
        counts[:] = true

    found = details(report_of(mutant(change), "kv_append"))
    assert any("cache[" in d and "must not be touched" in d for d in found)


def test_a_row_of_padding_that_moves_a_sequence_on_is_caught():
    def change(need, right, place, counts, args, view):
        true = counts.copy()
        counts[Count.ROWS] = need.rows
        right()
        counts[:] = true

    found = details(report_of(mutant(change), "advance"))
    assert any("slots[" in d for d in found)


@pytest.mark.parametrize(
    ("op", "word", "label"),
    [
        ("add", Count.TOKENS, ""),
        ("linear", Count.TOKENS, "(in=33 "),
        ("paged_attention", Count.SEQUENCES, "(heads=4/4 dim=32 page=16 longest=40"),
    ],
)
def test_a_length_remembered_from_the_capture_is_caught_in_the_replay(op, word, label):
    class Stale(ReferenceImplementation):
        def bind(self, need, context):
            self._kept = np.frombuffer(context.backend.view(context.counts, 32), np.int32)[word].copy()
            return super().bind(need, context)

        def run(self, need, sizes, weights, view, args):
            counts = np.frombuffer(view(int(args[-1].value), 32), np.int32)
            true, counts[word] = counts[word].copy(), self._kept
            super().run(need, sizes, weights, view, args)
            counts[word] = true

    options = run.Options(label, FAST.activations, FAST.codecs)
    found = details(report_of(lambda name, kernels: Stale(PRIMITIVES[name], kernels), op, options))
    assert found
    assert all(d.startswith("replay with other inputs and lengths: y[") for d in found)


def test_a_part_that_is_never_written_is_seen_as_such():
    def change(need, right, place, counts, args, view):
        old = bytes(place("y")[-4:])
        right()
        place("y")[-4:] = old

    # Only trials whose live rows fill the bucket reach the last element.
    assert any("NaN: never written" in d for d in details(report_of(mutant(change), "add")))


def test_an_input_that_is_changed_is_caught():
    def change(need, right, place, counts, args, view):
        right()
        np.frombuffer(place("x"), np.float32)[0] += 1

    assert "input x[0, 0] was" in details(report_of(mutant(change), "add"))[0]


def test_a_weight_that_is_changed_is_caught():
    def change(need, right, place, counts, args, view):
        right()
        place("weight")[0] ^= 1

    assert "weight weight[0] was" in details(report_of(mutant(change), "rms_norm"))[0]


def test_results_that_differ_from_run_to_run_are_caught_although_each_is_near_enough():
    runs = [0]

    def change(need, right, place, counts, args, view):
        right()
        runs[0] += 1
        np.frombuffer(place("y"), np.float32)[0] *= np.float32(1 + runs[0] % 4 * 2.0**-24)

    found = details(report_of(mutant(change), "rms_norm"))
    assert any("second run: y has other bits" in d for d in found)


def test_a_wrong_token_is_wrong_however_near():
    def change(need, right, place, counts, args, view):
        right()
        sampled = np.frombuffer(place("sampled"), np.int32)
        sampled[0] ^= 1

    assert "as captured: sampled[0] is" in details(report_of(mutant(change), "sample"))[0]


def test_fused_ops_are_tried_where_recorded_programs_match():
    kernels = HostKernels()
    backend = HostBackend(kernels)
    good = ReferenceImplementation(compose(ADD_NORM, PRIMITIVES), kernels)
    report = run.test(run.Subject(backend, [good], "host", fused=[ADD_NORM]), FAST)
    assert report.ok, report.table()
    labels = {shape.label for shape in (*SHAPES, *LINEAR_SHAPES)}
    assert {result.label.split()[0] for result in report.results} == labels

    class Lossy(ReferenceImplementation):
        def run(self, need, sizes, weights, view, args):
            super().run(need, sizes, weights, view, args)
            h = [operand.name for operand in self._contract.operands].index("h")
            np.frombuffer(view(int(args[h].value), sizes["h"]), np.float32)[0] += 1

    bad = Lossy(compose(ADD_NORM, PRIMITIVES), kernels)
    report = run.test(run.Subject(backend, [bad], "host", fused=[ADD_NORM]), FAST)
    assert len(report.failures) == len(report.results)
    assert all("h[0, 0] is" in d for d in details(report))


class Choosy(ReferenceImplementation):
    """Takes bfloat16 only, never more than 64 features."""

    def supports(self, need):
        z = need.operands["z"]
        reasons = [f"works in bf16, and z is {z.dtype.value}"] if z.dtype is not DType.BF16 else []
        reasons += [f"{z.shape[1]} features are more than 64"] if z.shape[1] > 64 else []
        return Verdict.no(*reasons) if reasons else Verdict.yes()


def choosy(op, kernels):
    return Choosy(PRIMITIVES[op], kernels)


def test_what_is_not_supported_has_not_failed():
    report = report_of(choosy, "add", run.Options())
    assert report.ok, report.table()
    counts = {status: sum(r.status == status for r in report.results) for status in ("passed", "failed", "unsupported")}
    assert counts["passed"]
    assert counts["unsupported"] > counts["passed"]
    assert counts["failed"] == 0


def test_what_no_trial_exercises_is_not_proved():
    report = report_of(choosy, "add", FAST)
    assert not report.ok
    assert report.untested == ["add[reference_add]"]
    assert "UNTESTED add[reference_add]" in report.table()


def test_an_op_without_trials_is_missed():
    strange = ReferenceImplementation(compose(ADD_NORM, PRIMITIVES), HostKernels())
    report = run.test(run.Subject(HostBackend(HostKernels()), [strange], "host"), FAST)
    assert (report.ok, report.missing) == (False, ["add_norm"])


def test_an_op_of_a_plugin_brings_its_own_trials():
    def double(arrays, attrs):
        arrays["y"] = 2 * arrays["x"]

    x, y = Operand("x", "activation"), Operand("y", "activation", "out")
    op = Op("toy:double", (x, y), (), double, {DType.F32: Tolerance(0, 0)})

    def trials(seed, large):
        rng = np.random.default_rng(seed)
        shapes = {"x": ("T", 3), "y": ("T", 3)}
        cases = [Case("small", {"x": normal(rng, n, 3)}, {}, n, n, n, shapes=shapes) for n in (2, 4)]
        yield Trial(cases[0], cases[1])

    kernels = HostKernels()
    ops = {**PRIMITIVES, op.name: op}
    subject = run.Subject(
        HostBackend(kernels), [ReferenceImplementation(op, kernels)], "host", ops=ops, trials={op.name: trials}
    )
    report = run.test(subject, FAST)
    assert report.ok
    assert [result.id for result in report.results] == ["toy:double[reference_toy:double](small, f32)"]
    # The op says nothing about bfloat16, so nothing can be said about an implementation that runs in it.
    (failure,) = run.test(subject, run.Options(activations=(DType.BF16,))).failures
    assert "toy:double has no tolerance for bf16" in failure.detail


def test_a_printed_id_is_a_filter():
    report = report_of(choosy, "add", run.Options())
    wanted = next(result for result in report.results if result.status == "passed")
    again = report_of(choosy, "add", run.Options(filter=wanted.id))
    assert [result.id for result in again.results] == [wanted.id]
    assert wanted.id.startswith("add[reference_add](features=")
    assert not report_of(choosy, "add", run.Options(filter="linear[")).results


def test_a_plugin_that_throws_fails_its_trial_and_no_other():
    class Throwing(ReferenceImplementation):
        def bind(self, need, context):
            if need.tokens > 20:
                raise KeyError("tile")
            return super().bind(need, context)

    report = report_of(lambda op, kernels: Throwing(PRIMITIVES[op], kernels), "add")
    assert {result.detail for result in report.failures} == {"KeyError: 'tile'"}
    assert any(result.status == "passed" for result in report.results)


def test_a_lost_device_ends_the_run_and_the_report_says_where():
    kernels = HostKernels()
    backend = HostBackend(kernels)
    backend.injection = Injection(on_launch=backend.injection.on_launch, fail_at=5, sticky=True)
    report = run.test(run.Subject(backend, [ReferenceImplementation(PRIMITIVES["add"], kernels)], "host"), FAST)
    assert not report.ok
    assert [result.status for result in report.results] == ["passed", "failed"]
    assert report.results[-1].id in report.lost


def test_a_slow_kernel_is_replayed_fewer_times():
    kernels = HostKernels()
    ticks = iter(range(10**6))
    backend = HostBackend(kernels)
    subject = run.Subject(backend, [ReferenceImplementation(PRIMITIVES["add"], kernels)], "host")
    timings = run.bench(subject, FAST, clock=lambda: next(ticks) / 128, replays=50)
    # Two single replays of 7.8 ms each settle the number: two of them nearly fill a run of 20 ms.
    assert backend.submissions == len(timings) * (2 + 5 * 2)


def test_support_answers_without_running_anything():
    kernels = HostKernels()
    backend = HostBackend(kernels)
    report = run.support(run.Subject(backend, [Choosy(PRIMITIVES["add"], kernels)], "host"))
    assert not backend.submissions
    (row,) = json.loads(json.dumps(report.as_dict()))["implementations"]
    assert (row["op"], row["implementation"], row["failed"]) == ("add", "reference_add", 0)
    assert row["passed"] == len([r for r in report.results if r.status == "passed"]) > 0
    assert "works in bf16, and z is f32, 576 features are more than 64" in row["reasons"]


def test_bench_times_large_trials_with_the_clock_it_is_given():
    kernels = HostKernels()
    ticks = iter(range(10**6))
    implementation = ReferenceImplementation(PRIMITIVES["add"], kernels)
    timings = run.bench(
        run.Subject(HostBackend(kernels), [implementation], "host"),
        FAST,
        bandwidth=1e12,
        clock=lambda: next(ticks) * 1e-6,
        replays=2,
    )
    first = timings[0]
    assert first.microseconds == pytest.approx(0.5)
    assert first.nbytes == 3 * 4096 * 4  # x, z and y of one row
    assert first.bandwidth_share == pytest.approx(3 * 4096 * 4 / 0.5e-6 / 1e12)
    assert json.dumps([timing.as_dict() for timing in timings])
    with pytest.raises(DeviceError, match="nothing can be timed"):
        run.bench(run.Subject(HostBackend(kernels), [implementation], "host"), FAST)

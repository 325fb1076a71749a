"""The trials themselves: complete, repeatable, of the shapes they declare, and free of coin tosses."""

import numpy as np
import pytest

from atlas_core.ops.cases import GENERATORS, trials
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.ops.sampling import choose, gumbel
from atlas_core.ops.sampling_cases import PARAMS, clear_draw


def test_every_primitive_has_trials():
    assert set(GENERATORS) == set(PRIMITIVES)


@pytest.mark.parametrize("op", PRIMITIVES)
def test_arrays_have_the_declared_shapes_and_live_counts_that_differ_show_a_captured_length(op):
    lives = []
    for trial in trials(op, 3):
        lives.append([(case.tokens, case.rows, case.sequences) for case in (trial.first, trial.second)])
        assert trial.first.attrs == trial.second.attrs
        assert trial.first.shapes == trial.second.shapes
        for case in (trial.first, trial.second):
            counts = {
                "T": case.tokens,
                "S": case.sequences,
                "S+1": case.sequences + 1,
                "R": case.rows,
                "U": case.updates,
            }
            arrays = {name: array.copy() for name, array in case.arrays.items()}
            PRIMITIVES[op].reference(arrays, case.attrs)
            for operand in PRIMITIVES[op].operands:
                shape = arrays[operand.name].shape
                pageless = (shape[0], *shape[2:]) if operand.kind == "cache" else shape
                assert pageless == tuple(counts.get(dim, dim) for dim in case.shapes[operand.name]), (
                    trial.label,
                    operand.name,
                )
                if operand.role == "out" and arrays[operand.name].dtype.kind == "f" and op != "process_logits":
                    assert np.isfinite(arrays[operand.name]).all(), (trial.label, operand.name)
    assert sum(first != second for first, second in lives) > len(lives) / 2


@pytest.mark.parametrize("op", PRIMITIVES)
def test_the_same_seed_gives_the_same_bits_and_labels_are_unique(op):
    labels = []
    for one, other in zip(trials(op, 5), trials(op, 5), strict=True):
        labels.append(one.label)
        for name, array in one.second.arrays.items():
            assert np.array_equal(array.view(np.uint8), other.second.arrays[name].view(np.uint8)), (one.label, name)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("params", [p for p in PARAMS if not p.greedy], ids=str)
def test_no_rounding_changes_what_a_trial_samples(params):
    rng = np.random.default_rng(8)
    for position in range(5):
        logits, seed = clear_draw(rng, params, 500, position)
        noise = gumbel(seed, position, 500)
        values = (params.temperature, params.top_k, params.top_p, params.min_p)
        want = choose(logits, *values, noise)
        # Errors proportional to how far a logit lies below the maximum, as arithmetic in another order makes them.
        error = np.float32(1) + rng.standard_normal(500).astype(np.float32) * np.float32(2e-7)
        moved = logits.max() + (logits - logits.max()) * error
        assert choose(moved, *values, noise + rng.standard_normal(500).astype(np.float32) * np.float32(1e-5)) == want

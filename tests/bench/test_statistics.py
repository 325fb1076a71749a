import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.bench.statistics import describe, percentile

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)
SHARES = st.floats(0, 1)


@given(VALUES, SHARES)
def test_the_percentile_is_numpys(values, share):
    ours = percentile(sorted(values), share)
    assert ours == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-6)


@given(VALUES, SHARES, SHARES)
def test_percentiles_ascend_and_stay_inside(values, one, other):
    ordered = sorted(values)
    low, high = sorted((one, other))
    assert ordered[0] <= percentile(ordered, low) <= ordered[-1]
    assert percentile(ordered, low) <= percentile(ordered, high) + 1e-6
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 1) == ordered[-1]


@given(VALUES)
def test_a_distribution_does_not_depend_on_order(values):
    found = describe(values)
    assert found == describe(values[::-1])
    assert found.count == len(values)
    assert found.p50 <= found.p90 <= found.p99 <= found.largest == max(values)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)


def test_known_values():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([10.0, 20.0], 0.9) == 19.0
    assert describe([]) is None


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_what_has_no_percentile(values, share):
    with pytest.raises(ValueError, match=r"no percentile|a share"):
        percentile(values, share)

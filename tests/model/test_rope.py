"""Rotary frequencies: yarn against its formula, as published and as the reference implementation applies it."""

import math

import numpy as np
import pytest

from atlas_core.model.config import ConfigReader
from atlas_core.model.rope import read_rope
from atlas_core.vocab.errors import CheckpointError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rope(scaling, theta=1e6, **config):
    return read_rope(ConfigReader({"rope_theta": theta, "rope_scaling": scaling, **config}))


def by_parts(dim, base, factor, length, fast=32.0, slow=1.0, truncate=True):
    """Pair by pair, from the wavelength: interpolated, extrapolated, or a share of both (Peng et al., 2023, section 3.2)."""
    border = [dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow)]
    if truncate:
        border = [math.floor(border[0]), math.ceil(border[1])]
    low, high = max(border[0], 0), min(border[1], dim - 1)
    result = []
    for pair in range(dim // 2):
        own = base ** (-2 * pair / dim)
        share = min(max((pair - low) / (high - low), 0), 1)
        result.append(own / factor * share + own * (1 - share))
    return np.array(result)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("more", [{}, {"beta_fast": 16, "beta_slow": 2}, {"truncate": False}])
def test_yarn_blends_by_parts(dim, more):
    found = rope({**YARN, **more}).inv_freq(dim)
    names = {"beta_fast": "fast", "beta_slow": "slow", "truncate": "truncate"}
    want = by_parts(dim, 1e6, 4.0, 32768, **{names[key]: value for key, value in more.items()})
    np.testing.assert_allclose(found, want, rtol=1e-6)
    plain = rope(None).inv_freq(dim)
    assert found[0] == plain[0]
    np.testing.assert_allclose(found[-1], plain[-1] / 4, rtol=1e-6)
    assert ((found < plain * 0.999) & (found > plain * 0.251)).any()


def test_yarn_of_qwen3_with_heads_of_128():
    """The borders are pairs 23 and 40: 128 ln(32768 / 64π) / (2 ln 10⁶) = 23.6, and 128 ln(32768 / 2π) / (2 ln 10⁶) = 39.6."""
    ratio = rope(YARN).inv_freq(128) / rope(None).inv_freq(128)
    np.testing.assert_allclose(
        ratio[[0, 23, 24, 32, 40, 63]], [1, 1, 1 - 0.75 / 17, 1 - 0.75 * 9 / 17, 0.25, 0.25], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.8}, 0.8),
        ({"mscale": 0.5, "mscale_all_dim": 0.25}, (0.05 * math.log(4) + 1) / (0.025 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_corrects_attention_by_the_scale_of_rotations(more, scale):
    assert rope({**YARN, **more}).scale == pytest.approx(scale, rel=1e-12)
    assert rope(None).scale == 1.0


def test_the_original_length_is_that_of_the_model_unless_said():
    short = rope({"type": "yarn", "factor": 2.0}, max_position_embeddings=4096)
    said = rope({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096})
    assert short == said


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"factor": None}, "factor"),
        ({"factor": 0}, "factor"),
        ({"factor": "four"}, "factor"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"attention_factor": -1.0}, "attention_factor"),
        ({"gamma": 1}, "gamma"),
    ],
)
def test_yarn_that_means_nothing_is_refused(more, word):
    with pytest.raises(CheckpointError, match=word):
        rope({**YARN, **more})


def test_a_part_of_each_head_turns_wherever_that_is_said() -> None:
    given = rope({"rope_type": "default", "partial_rotary_factor": 0.25}, theta=1e4)
    assert given == rope(None, theta=1e4, partial_rotary_factor=0.25)
    assert (given.rotated(64), given.inv_freq(16)[-1]) == (16, np.float32(1e4 ** (-14 / 16)))
    assert rope(None, theta=1e4).rotated(64) == 64


@pytest.mark.parametrize(
    ("inner", "outer"), [(0.5, 0.25), ("half", None), (None, True), (None, 0.01), (None, 1.5), (None, 0.05)]
)
def test_parts_that_mean_nothing_are_refused(inner: object, outer: object) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        rope({"rope_type": "default", "partial_rotary_factor": inner}, theta=1e4, partial_rotary_factor=outer).rotated(
            64
        )

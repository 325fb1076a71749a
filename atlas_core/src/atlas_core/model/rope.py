"""Rotary frequencies, in every spelling in which configurations give them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_core.model.config import ConfigReader, contradiction
from atlas_core.vocab.errors import CheckpointError

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """``kind`` is default, linear or llama3; ``parameters`` are that kind's numbers by their config.json names."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def inv_freq(self, rotated: int) -> np.ndarray:
        """float32 [rotated / 2]: radians per position of each pair of dimensions.

        default: theta^(-2i/rotated) (Su et al., 2021). linear: divided by ``factor``. llama3: wavelengths above
        original/low are divided by ``factor``, below original/high kept, between them blended (Llama 3.1 model card).
        """
        frequency = self.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        given = dict(self.parameters)
        if self.kind == "linear":
            frequency = frequency / given["factor"]
        elif self.kind == "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            turns = given["original_max_position_embeddings"] * frequency / (2 * math.pi)
            blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
            frequency = (1 - blend) * frequency / given["factor"] + blend * frequency
        return frequency.astype(np.float32)


def read_rope(config: ConfigReader, default_theta: float | None = None) -> Rope:
    """From ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``; ``type`` and ``rope_type`` are one key.

    Raises CheckpointError for an unknown kind, a missing number, or two places that disagree.
    """
    theta = config.get("rope_theta", (int, float), None)
    scaling = config.get("rope_scaling", dict, None)
    parameters = config.get("rope_parameters", dict, None)
    if (
        scaling
        and parameters
        and _normal(scaling) != {k: v for k, v in _normal(parameters).items() if k != "rope_theta"}
    ):
        raise contradiction("rope_scaling", f"rope_parameters says {parameters!r}, rope_scaling says {scaling!r}")
    given = _normal({**(scaling or {}), **(parameters or {})})
    inner = given.pop("rope_theta", None)
    if theta is not None and inner is not None and theta != inner:
        raise contradiction("rope_theta", f"{theta} beside rope_parameters, which says {inner}")
    theta = theta if theta is not None else inner if inner is not None else default_theta
    if theta is None:
        raise CheckpointError("config.json has no rope_theta", "every position would be encoded wrongly", "add the key")
    kind = given.pop("rope_type", "default")
    if kind not in _KEYS:
        raise CheckpointError(
            f"rope_type {kind!r} in config.json is not known",
            f"this version computes {', '.join(_KEYS)}; another scaling would give wrong text at long range",
            "update Atlas or the model plugin",
        )
    wanted = _KEYS[kind]
    extra, missing = sorted(set(given) - set(wanted)), sorted(set(wanted) - set(given))
    if kind == "default":
        # transformers writes scaling numbers beside "default" in some files; they would be ignored there as well
        extra = [key for key in extra if key != "original_max_position_embeddings"]
    if extra or missing:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(extra)}"
        raise CheckpointError(
            f"the {kind} rope scaling in config.json {problem}", f"it takes {wanted}", "correct the file"
        )
    return Rope(float(theta), kind, tuple((key, float(given[key])) for key in wanted))


def _normal(given: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling of the kind. Raises CheckpointError when ``type`` and ``rope_type`` differ."""
    result = dict(given)
    old = result.pop("type", None)
    if old is not None and result.setdefault("rope_type", old) != old:
        raise contradiction("rope_scaling", f"type is {old!r} and rope_type is {result['rope_type']!r}")
    return result

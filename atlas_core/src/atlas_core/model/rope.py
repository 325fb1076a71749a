"""Rotary frequencies, in every spelling in which configurations give them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from atlas_core.model.config import ConfigReader, contradiction
from atlas_core.vocab.errors import CheckpointError

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: Mapping[str, Mapping[str, float | None]] = {
    "yarn": {
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "mscale": None, "mscale_all_dim": None,
        "truncate": True,
    },
}  # fmt: skip
"""Numbers that a kind may leave out, and what they are then (None: they have no part in it)."""
_PARTIAL = "partial_rotary_factor"


class Rope(Struct, frozen=True):
    """``kind`` is default, linear, llama3 or yarn; ``parameters`` are that kind's numbers by their config.json names.

    ``partial`` of each head is rotated (``partial_rotary_factor``).
    """

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()
    partial: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Dimensions of a head that turn, the first ones. Raises CheckpointError when they are no pairs, or none."""
        rotated = int(head_dim * self.partial)
        if not 0 < rotated <= head_dim or rotated % 2:
            raise CheckpointError(
                f"partial_rotary_factor {self.partial} rotates {rotated} of {head_dim} dimensions",
                "rotary positions rotate pairs of dimensions of a head",
                "correct config.json",
            )
        return rotated

    def inv_freq(self, rotated: int) -> np.ndarray:
        """float32 [rotated / 2]: radians per position of each pair of dimensions.

        default: theta^(-2i/rotated) (Su et al., 2021). linear: divided by ``factor``. llama3: wavelengths above
        original/low are divided by ``factor``, below original/high kept, between them blended (Llama 3.1 model card).
        yarn: dimensions that turn less than ``beta_slow`` times over the original length are divided by ``factor``, those that turn
        more than ``beta_fast`` times kept, between them blended along the dimension (Peng et al., 2023, "NTK-by-parts").
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
        elif self.kind == "yarn":
            blend = 1 - self._yarn_ramp(rotated)
            frequency = (1 - blend) * frequency / given["factor"] + blend * frequency
        return frequency.astype(np.float32)

    @property
    def scale(self) -> float:
        """What sines and cosines are multiplied by: yarn's correction of attention for a longer context, else 1.

        ``attention_factor`` as given, or 0.1·mscale·ln(factor) + 1, over the same of ``mscale_all_dim`` where both are given.
        """
        given = dict(self.parameters)
        if self.kind != "yarn":
            return 1.0
        if "attention_factor" in given:
            return given["attention_factor"]
        if given.get("mscale") and given.get("mscale_all_dim"):
            return _magnitude(given["factor"], given["mscale"]) / _magnitude(given["factor"], given["mscale_all_dim"])
        return _magnitude(given["factor"], 1.0)

    def _yarn_ramp(self, rotated: int) -> np.ndarray:
        """float64 [rotated / 2]: 0 where frequencies are kept, 1 where they are divided, a line between."""
        given = dict(self.parameters)
        length = given["original_max_position_embeddings"]

        def dimension(turns: float) -> float:
            """The one, of all ``rotated``, that turns so often over the original length."""
            return rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(given["beta_fast"]), dimension(given["beta_slow"])
        if given["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        high += 0.001 if low == high else 0  # as the reference keeps the line from having no length
        ramp: np.ndarray = np.clip((np.arange(rotated // 2) - low) / (high - low), 0.0, 1.0)
        return ramp


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def read_rope(config: ConfigReader, default_theta: float | None = None) -> Rope:
    """From ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``; ``type`` and ``rope_type`` are one key.

    ``partial_rotary_factor`` may stand beside or among them. Raises CheckpointError for an unknown kind, a missing number, or two places
    that disagree.
    """
    theta = config.get("rope_theta", (int, float), None)
    scaling = config.get("rope_scaling", dict, None)
    parameters = config.get("rope_parameters", dict, None)
    if scaling and parameters and _scaling(scaling) != _scaling(parameters):
        raise contradiction("rope_scaling", f"rope_parameters says {parameters!r}, rope_scaling says {scaling!r}")
    given = _normal({**(scaling or {}), **(parameters or {})})
    partial = _partial(config, given.pop(_PARTIAL, None))
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
    if kind == "yarn" and given.get("original_max_position_embeddings") is None:
        given["original_max_position_embeddings"] = config.positive("max_position_embeddings")
    wanted, optional = _KEYS[kind], _OPTIONAL.get(kind, {})
    given = {key: value for key, value in given.items() if value is not None}
    extra, missing = sorted(set(given) - {*wanted, *optional}), sorted(set(wanted) - set(given))
    if kind == "default":
        # transformers writes scaling numbers beside "default" in some files; they would be ignored there as well
        extra = [key for key in extra if key != "original_max_position_embeddings"]
    if extra or missing:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(extra)}"
        raise CheckpointError(
            f"the {kind} rope scaling in config.json {problem}", f"it takes {wanted}", "correct the file"
        )
    numbers = {key: value for key, value in {**optional, **given}.items() if key in {*wanted, *optional}}
    for key, value in numbers.items():
        if value is not None and not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{key} of the {kind} rope scaling is {value!r}", "it must be a number", "correct config.json"
            )
    if kind == "yarn":
        _check_yarn(numbers)
    return Rope(
        float(theta),
        kind,
        tuple((key, float(numbers[key])) for key in (*wanted, *optional) if numbers[key] is not None),
        partial,
    )


def _partial(config: ConfigReader, inner: Any) -> float:
    """``partial_rotary_factor``, beside the rope parameters or (``inner``) among them; all of a head where neither says."""
    outer = config.get(_PARTIAL, object, None)
    if inner is not None and outer is not None and inner != outer:
        raise contradiction(_PARTIAL, f"{outer!r} in one place and {inner!r} in another")
    given = outer if outer is not None else inner if inner is not None else 1.0
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise CheckpointError(f"{_PARTIAL} is {given!r}", "it must be a number", "correct config.json")
    return float(given)


def _scaling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What both spellings of the parameters must agree about."""
    return {key: value for key, value in _normal(given).items() if key not in ("rope_theta", _PARTIAL)}


def _check_yarn(numbers: Mapping[str, Any]) -> None:
    """Raises CheckpointError for numbers with which the formula means nothing."""
    for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"):
        if numbers[key] is not None and numbers[key] <= 0:
            raise CheckpointError(f"{key} of the yarn rope scaling is {numbers[key]}", "it must be above zero")
    if numbers["beta_fast"] < numbers["beta_slow"]:
        raise contradiction("beta_fast", f"{numbers['beta_fast']} is below beta_slow {numbers['beta_slow']}")


def _normal(given: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling of the kind. Raises CheckpointError when ``type`` and ``rope_type`` differ."""
    result = dict(given)
    old = result.pop("type", None)
    if old is not None and result.setdefault("rope_type", old) != old:
        raise contradiction("rope_scaling", f"type is {old!r} and rope_type is {result['rope_type']!r}")
    return result

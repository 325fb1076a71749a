"""What the family writes beside the kind of rotary positions: how much of a head turns, and sections for pictures. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atlas_core.model.config import contradiction
from atlas_core.vocab.errors import CheckpointError

_PLACES = ("rope_scaling", "rope_parameters")
_OWN = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True)
class Rotary:
    """``factor`` of each head is rotated. ``sections`` share its pairs among time, height and width of a picture.

    All three positions of a text token are equal, so that sections and their interleaving make no difference to text.
    """

    factor: float
    sections: tuple[int, ...]

    def rotated(self, head_dim: int) -> int:
        """Rotated dimensions of a head. Raises CheckpointError when they are no pairs, or the sections do not cover them."""
        rotated = int(head_dim * self.factor)
        if not 0 < rotated <= head_dim or rotated % 2:
            raise CheckpointError(
                f"partial_rotary_factor {self.factor} rotates {rotated} of {head_dim} dimensions",
                "rotary positions rotate pairs of dimensions of a head",
                "correct config.json",
            )
        if self.sections and sum(self.sections) * 2 != rotated:
            raise contradiction("mrope_section", f"{list(self.sections)} does not sum up to {rotated // 2} pairs")
        return rotated


def split_rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Rotary]:
    """The configuration without the family's own rotary keys, and what these say.

    They stand beside the other keys or among the rope parameters, in the outer or the text configuration.
    Raises CheckpointError for two values of one key, or a value of another type.
    """
    found: dict[str, Any] = {}
    plain = _without(config, found)
    if "text_config" in config and isinstance(config["text_config"], dict):
        plain = {**plain, "text_config": _without(config["text_config"], found)}
    factor, sections = found.get("partial_rotary_factor", 1.0), found.get("mrope_section", [])
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise CheckpointError(f"partial_rotary_factor is {factor!r}", "it must be a number", "correct config.json")
    if not isinstance(sections, list) or any(type(part) is not int or part < 0 for part in sections):
        raise CheckpointError(f"mrope_section is {sections!r}", "it must be a list of numbers", "correct config.json")
    return plain, Rotary(float(factor), tuple(sections))


def _without(level: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One level without the own keys, which go to ``found``. A place of which nothing is left but the kind is kept."""
    result = _taken(level, found)
    for place in _PLACES:
        if isinstance(level.get(place), dict):
            result[place] = _taken(level[place], found)
    return result


def _taken(mapping: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    for key in _OWN:
        value = mapping.get(key)
        if value is not None and found.setdefault(key, value) != value:
            raise contradiction(key, f"{found[key]!r} in one place and {value!r} in another")
    return {key: value for key, value in mapping.items() if key not in _OWN}

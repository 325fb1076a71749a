"""What the family writes beside the kind of rotary positions: sections for pictures. Pure."""

from collections.abc import Mapping
from typing import Any

from atlas_core.model.config import contradiction
from atlas_core.vocab.errors import CheckpointError

_PLACES = ("rope_scaling", "rope_parameters")
_OWN = ("mrope_section", "mrope_interleaved")


def split_sections(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """The configuration without the keys of sections, and the sections.

    Sections share the pairs of a head among time, height and width of a picture. All three positions of a text token are equal, so
    that sections and their interleaving make no difference to text. The keys stand beside the others or among the rope
    parameters, in the outer or the text configuration. Raises CheckpointError for two values of one key, or a value of another type.
    """
    found: dict[str, Any] = {}
    plain = _without(config, found)
    if "text_config" in config and isinstance(config["text_config"], dict):
        plain = {**plain, "text_config": _without(config["text_config"], found)}
    sections = found.get("mrope_section", [])
    if not isinstance(sections, list) or any(type(part) is not int or part < 0 for part in sections):
        raise CheckpointError(f"mrope_section is {sections!r}", "it must be a list of numbers", "correct config.json")
    return plain, tuple(sections)


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

"""MODEL.toml: one file for each model that a plugin knows by name. Unknown keys are errors that name file and key."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atlas_core.vocab.errors import PluginError
from atlas_core.vocab.preset import ModelPreset
from atlas_core.vocab.resolve import Resolution, resolve
from atlas_core.vocab.verdict import Verdict

FOLDER, FILE = "models", "MODEL.toml"
SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "top_k": (-1, 2**31), "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (1e-3, 100.0),
}  # fmt: skip
"""Fields that a preset may set, with the least and the largest value."""
_PARTS = 3  # of a path in which a model's name may stand: owner and model, or those of a cache of the Hub


def read_presets(package: str) -> list[ModelPreset]:
    """All presets of an importable package, by name. Raises PluginError for a file that says anything unknown, or nothing."""
    spec = find_spec(package)  # importlib.resources would load what opens archives to say so
    folder = next((Path(place) / FOLDER for place in (spec and spec.submodule_search_locations) or ()), None)
    if folder is None or not folder.is_dir():
        raise PluginError(
            f"{package} has no folder {FOLDER}", f"its plugin says that {FOLDER}/<model>/{FILE} are in it",
            "install the plugin again",
        )  # fmt: skip
    found = [_read(package, entry) for entry in folder.iterdir() if entry.is_dir() and entry.joinpath(FILE).is_file()]
    return sorted(found, key=lambda preset: preset.name)


def _read(package: str, folder: Path) -> ModelPreset:
    origin = f"{package}/{FOLDER}/{folder.name}/{FILE}"
    return parse_preset(folder.name, folder.joinpath(FILE).read_text(encoding="utf-8"), origin)


def parse_preset(name: str, text: str, origin: str) -> ModelPreset:
    """One MODEL.toml. Raises PluginError naming the key at fault."""
    import tomllib  # a start that takes what was kept reads none

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _fault(origin, f"is no TOML: {error}") from error
    match, sampling, dialect = (_table(content, key, origin) for key in ("match", "sampling", "dialect"))
    _known(content, ("match", "sampling", "dialect"), origin, "")
    _known(match, ("model_types", "hidden_size", "names"), origin, "match.")
    _known(sampling, SAMPLING, origin, "sampling.")
    _known(dialect, ("tool_calls", "reasoning"), origin, "dialect.")
    types, names = _strings(match, "model_types", origin), _strings(match, "names", origin)
    if not types:
        raise _fault(origin, "has no match.model_types")
    size = match.get("hidden_size", 0)
    if type(size) is not int or size < 0:
        raise _fault(origin, f"match.hidden_size is {size!r}, no size")
    for key, value in sampling.items():
        low, high = SAMPLING[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _fault(origin, f"sampling.{key} is {value!r}, no number from {low:g} to {high:g}")
    for key, value in dialect.items():
        if not isinstance(value, str) or not value:
            raise _fault(origin, f"dialect.{key} is {value!r}, no name")
    return ModelPreset(
        name, origin, types, size, tuple(part.lower() for part in names), tuple(sampling.items()),
        dialect.get("tool_calls", ""), dialect.get("reasoning", ""),
    )  # fmt: skip


def choose_preset(
    presets: Sequence[ModelPreset], model_type: str, hidden_size: int, path: str
) -> Resolution[ModelPreset]:
    """The preset of a checkpoint: of those for its type, one for its size before one for any, the longest fitting name first.

    A preset with names is for checkpoints whose path has one of them among its last parts. There may be none.
    """
    tail = "/".join(path.replace("\\", "/").rstrip("/").lower().split("/")[-_PARTS:])

    def verdict(preset: ModelPreset) -> Verdict:
        fitting = [len(part) for part in preset.names if part in tail]
        reasons = []
        if model_type not in preset.model_types:
            reasons.append(f"it is for {' and '.join(preset.model_types)}, not {model_type}")
        if preset.hidden_size not in (0, hidden_size):
            reasons.append(f"it is for a hidden size of {preset.hidden_size}, not {hidden_size}")
        if preset.names and not fitting:
            reasons.append(f"the checkpoint is not called {' or '.join(preset.names)}")
        return (
            Verdict.no(*reasons) if reasons else Verdict.yes(10000 * bool(preset.hidden_size) + max(fitting, default=0))
        )

    return resolve([(preset.name, preset) for preset in presets], verdict)


def _table(content: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise _fault(origin, f"{key} is {value!r}, no table")
    return value


def _strings(table: Mapping[str, Any], key: str, origin: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or any(not isinstance(item, str) or not item for item in value):
        raise _fault(origin, f"match.{key} is {value!r}, no list of names")
    return tuple(value)


def _known(table: Mapping[str, Any], keys: Sequence[str] | Mapping[str, Any], origin: str, prefix: str) -> None:
    for key in table:
        if key not in keys:
            raise _fault(origin, f"has the unknown key {prefix}{key}; known are {', '.join(keys)}")


def _fault(origin: str, text: str) -> PluginError:
    return PluginError(f"{origin} {text}", "what it says would not hold", "correct the file, or update its plugin")

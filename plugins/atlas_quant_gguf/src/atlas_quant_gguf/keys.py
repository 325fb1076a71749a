"""The metadata of one architecture, with a note of every key that was asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atlas_core.vocab.errors import CheckpointError

_LARGEST = float(np.finfo(np.float32).max)


class Keys:
    """The keys ``<architecture>.*``, each asked for by name and type. Raises CheckpointError naming a key that is missing or of another type."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any], path: Path) -> None:
        self.architecture = architecture
        self._prefix = f"{architecture}."
        self._metadata = metadata
        self._path = path
        self._used: set[str] = set()

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number; one for every layer is taken when all are the same."""
        value = self._take(name, default)
        if isinstance(value, list) and value and len(set(map(repr, value))) == 1:
            value = value[0]  # one count a layer, all the same
        if type(value) is not int or value <= 0:
            raise self.bad(name, value, "a positive whole number, the same for every layer")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._take(name, default)
        if type(value) not in (float, int) or not 0 < value < _LARGEST:
            raise self.bad(name, value, "a positive number")
        # Files hold float32: the shortest decimal that gives it back is the number its author wrote.
        return float(str(np.float32(value)))

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self.bad(name, value, "a string")
        return value

    def count(self, name: str) -> int:
        """A whole number, 0 where the key is not there."""
        value = self._take(name, 0)
        if type(value) is not int or value < 0:
            raise self.bad(name, value, "a whole number")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, empty where the key is not there."""
        value = self._take(name, [])
        if not isinstance(value, list) or any(type(part) is not int or part < 0 for part in value):
            raise self.bad(name, value, "a list of whole numbers")
        return value

    def has(self, name: str) -> bool:
        """Whether the key is there."""
        return self._prefix + name in self._metadata

    def bad(self, name: str, value: Any, expected: str) -> CheckpointError:
        """The refusal of a value."""
        return CheckpointError(
            f"{self._path}: the key {self._prefix}{name} is {value!r}", f"{expected} is expected", "use another file"
        )

    def check_all_used(self) -> None:
        """Raises CheckpointError for a key that nobody asked for, unless it counts parts that the model has none of."""
        unused = [
            key
            for key in self._metadata
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in self._used
        ]
        # Counts of parts that the model could have and has none of.
        unused = [key for key in unused if self._metadata[key] not in (0, False, [])]
        if unused:
            raise CheckpointError(
                f"{self._path}: the key {unused[0]} = {str(self._metadata[unused[0]])[:60]} is not understood",
                "it may change what the model computes",
                "use the model's safetensors checkpoint, or a newer atlas-quant-gguf",
            )

    def _take(self, name: str, default: Any) -> Any:
        self._used.add(name)
        value = self._metadata.get(self._prefix + name, default)
        if value is None:
            raise CheckpointError(
                f"{self._path} lacks the key {self._prefix}{name}",
                "the model cannot be built without it",
                "use another file",
            )
        return value

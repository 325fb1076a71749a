"""The container ``huggingface``: a directory of config.json, safetensors files and a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from atlas_core.contracts.checkpoint import Extent, TokenizerSource
from atlas_core.loading.directory import ModelDirectory
from atlas_core.loading.files import AGAIN, RangeFile, unreadable
from atlas_core.loading.safetensors import BITS, Stored, read_header
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES = {
    "F64": DType.F64, "F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16,
    "I64": DType.I64, "I32": DType.I32, "I16": DType.I16, "I8": DType.I8,
    "U64": DType.U64, "U32": DType.U32, "U16": DType.U16, "U8": DType.U8, "BOOL": DType.BOOL,
    "F8_E4M3": DType.F8E4M3, "F8_E5M2": DType.F8E5M2,
}  # fmt: skip


def _layouts() -> dict[str, StorageLayout]:
    """Storage layout of every safetensors dtype. Those that are no DType keep the format's own name, lower case."""
    layouts = {stored: plain(dtype) for stored, dtype in _NAMES.items()}
    for stored, bits in BITS.items():
        if stored not in layouts:
            block = {4: 2, 6: 4}.get(bits, 1)
            layouts[stored] = StorageLayout(stored.lower().replace("_", ""), block, bits * block // 8)
    return layouts


LAYOUTS: Mapping[str, StorageLayout] = _layouts()
"""safetensors dtype → storage layout."""


class HuggingFaceReader:
    """Opens model directories as they lie on the Hub."""

    name = "huggingface"

    def detect(self, path: Path) -> Verdict:
        """Yes for a directory with config.json and safetensors files."""
        if not path.is_dir():
            return Verdict.no("it is not a directory")
        if not (path / "config.json").is_file():
            return Verdict.no("it has no config.json")
        if not any(path.glob("*.safetensors")) and not (path / _INDEX).is_file():
            pickles = sorted(file.name for file in path.glob("*.bin"))
            return Verdict.no(f"it has no *.safetensors{f', only {pickles[0]}, a pickle' if pickles else ''}")
        return Verdict.yes(0, "config.json and safetensors files")

    def open(self, path: Path) -> "HuggingFaceCheckpoint":
        """Read config.json and the header of every shard. Raises CheckpointError."""
        return HuggingFaceCheckpoint(path)


class HuggingFaceCheckpoint:
    """An opened model directory; see contracts.checkpoint.Checkpoint."""

    naming = "hf"

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when a file is missing, cut or contradicts another."""
        directory = ModelDirectory(path)
        self.path = path
        self.config = directory.config
        self.generation_config = directory.generation_config
        self.quantization = directory.quantization
        self.pooling = directory.pooling()
        self._directory = directory
        self._files: dict[str, RangeFile] = {}
        self._stored: dict[str, tuple[RangeFile, Stored]] = {}
        try:
            self._open_shards()
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, stored.shape, LAYOUTS[stored.dtype].name, stored.end - stored.start)
            for name, (_, stored) in self._stored.items()
        }
        self._by_name = {layout.name: layout for layout in LAYOUTS.values()}

    def layout(self, name: str) -> StorageLayout:
        """The storage layout called ``name``. Raises CheckpointError for a name that no safetensors dtype has."""
        try:
            return self._by_name[name]
        except KeyError:
            raise CheckpointError(
                f"safetensors files have no layout {name!r}", f"they have {', '.join(self._by_name)}"
            ) from None

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """See contracts.checkpoint.Checkpoint.read."""
        file, stored = self._find(name)
        if rows is None:
            return file.read([(stored.start, stored.end)])
        count = stored.shape[0] if stored.shape else 1
        if any(not 0 <= start <= end <= count for start, end in rows):
            raise CheckpointError(f"{name} of {self.path} has {count} rows", f"rows {list(rows)} were asked for")
        width = (stored.end - stored.start) // count if count else 0
        return file.read([(stored.start + start * width, stored.start + end * width) for start, end in rows])

    def extent(self, name: str) -> Extent:
        """See contracts.checkpoint.Located."""
        file, stored = self._find(name)
        return Extent(file.path, stored.start, stored.end - stored.start)

    def tokenizer(self) -> TokenizerSource:
        """See contracts.checkpoint.Checkpoint.tokenizer."""
        return self._directory.tokenizer()

    def close(self) -> None:
        """Close every shard; safe to call twice."""
        for file in self._files.values():
            file.close()

    def _find(self, name: str) -> tuple[RangeFile, Stored]:
        try:
            return self._stored[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}", "", "name a tensor of this checkpoint"
            ) from None

    def _open_shards(self) -> None:
        placed = self._index()
        for shard in sorted(set(placed.values())) or [self._only_file()]:
            if not (self.path / shard).is_file():
                raise CheckpointError(
                    f"{self.path / shard} does not exist", f"{_INDEX} names it", "download the whole model"
                )
            file = self._files[shard] = RangeFile(self.path / shard)
            for name, stored in read_header(file).items():
                if name in self._stored:
                    self._refuse(f"{name} is in {self._stored[name][0].path.name} and in {shard}")
                if placed.get(name, shard) != shard:
                    self._refuse(f"{_INDEX} places {name} in {placed[name]}, it is in {shard}")
                self._stored[name] = (file, stored)
        missing = sorted(placed.keys() - self._stored.keys())
        if missing:
            self._refuse(f"{_INDEX} places {missing[0]} in {placed[missing[0]]}, which does not have it")

    def _index(self) -> dict[str, str]:
        """Tensor → shard file by model.safetensors.index.json; empty when there is no index."""
        path = self.path / _INDEX
        if not path.is_file():
            return {}
        try:
            index: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise unreadable(path, error) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON", str(error), AGAIN) from error
        placed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(placed, dict) or not placed:
            self._refuse(f"{_INDEX} has no weight_map")
        for name, shard in placed.items():
            if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
                self._refuse(f"{_INDEX} places {name} in {shard!r}, which is not a safetensors file of this directory")
        if _SINGLE not in placed.values() and (self.path / _SINGLE).is_file():
            self._refuse(f"there are two sets of weights: {_SINGLE}, and the files that {_INDEX} names")
        return placed

    def _only_file(self) -> str:
        if (self.path / _SINGLE).is_file():
            return _SINGLE
        files = sorted(file.name for file in self.path.glob("*.safetensors"))
        if len(files) != 1:
            self._refuse(f"there is neither {_SINGLE} nor {_INDEX}, and there are {len(files)} other safetensors files")
        return files[0]

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"the weights in {self.path} contradict themselves or are incomplete", why, AGAIN)

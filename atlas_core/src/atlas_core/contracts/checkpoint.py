"""CheckpointReader: one container format (a Hugging Face directory, a GGUF file) as config, tensors and text parts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.model import TensorInfo
from atlas_core.vocab.verdict import Verdict


class BpeTables(Struct, frozen=True):
    """Every token in the order of the ids, none twice, and the pairs to merge, first ones first; ``merges`` is called when somebody encodes.

    ``tokens`` may decode each when it is asked for: few of them are before a text is encoded.
    """

    tokens: Sequence[str]
    merges: Callable[[], Sequence[tuple[str, str]]]


class TokenizerSource(Struct, frozen=True):
    """``json`` is the text of a tokenizer.json (``tokenizers`` reads it; no other class is consulted).

    A container that keeps a BPE model in another form may leave its ``vocab`` and ``merges`` empty there and give ``tables``.
    ``chat_templates`` maps names to Jinja sources, ``default`` being the usual one. ``special`` holds bos_token, eos_token
    and their like as strings, which templates may print.
    """

    json: str
    chat_templates: Mapping[str, str]
    special: Mapping[str, str]
    add_bos: bool = False
    tables: BpeTables | None = None


class Pooling(Struct, frozen=True):
    """How an embedding model makes one vector of a text: of the hidden states behind the final norm, that of the ``last`` token, of
    the first (``cls``), or the ``mean`` of all.

    ``normalised``: its length is made 1. ``prompt`` stands before every text.
    """

    kind: Literal["last", "cls", "mean"]
    normalised: bool
    prompt: str = ""


class Checkpoint(Protocol):
    """An opened checkpoint: headers are read and checked, tensor bytes are not.

    ``config`` is in the shape of a Hugging Face config.json, with ``model_type``. ``naming`` is the naming scheme of the
    tensors (``hf``, ``gguf``), a key of the model plugin's name maps. ``generation_config`` may be empty.
    ``quantization`` is the checkpoint's own statement about quantised weights, if any (config.json's quantization_config).
    """

    path: Path
    naming: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def layout(self, name: str) -> StorageLayout:
        """The storage layout called ``name`` in this checkpoint's tensors."""
        ...

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> bytes | memoryview:
        """The bytes of one tensor, or of the row ranges [start, end) in that order; never by mmap.

        Raises CheckpointError when the file ends early or cannot be read.
        """
        ...

    def tokenizer(self) -> TokenizerSource:
        """Raises CheckpointError when there is none or it is of an unknown kind."""
        ...

    def close(self) -> None:
        """Close files; safe to call twice."""
        ...


class Extent(Struct, frozen=True):
    """``nbytes`` bytes of a file, from ``start`` on."""

    path: Path
    start: int
    nbytes: int


@runtime_checkable
class Located(Protocol):
    """What a Checkpoint may offer besides: where tensors lie, so that the host reads them at the speed of its disk."""

    def extent(self, name: str) -> Extent:
        """Where ``read(name)`` finds its bytes. Raises CheckpointError for an unknown tensor."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """What a Checkpoint may offer besides: ``pooling`` is not None where the model was made to embed texts."""

    @property
    def pooling(self) -> Pooling | None:
        """See above."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """What a Checkpoint may offer besides: to be opened again without reading its headers."""

    def remembered(self) -> bytes:
        """What ``Reopening.reopen`` of its reader wants to know."""
        ...


@runtime_checkable
class Reopening(Protocol):
    """What a CheckpointReader may offer besides."""

    def reopen(self, path: Path, remembered: bytes) -> Checkpoint:
        """The checkpoint that ``remembered`` came from, whose files have not been changed since then.

        Raises CheckpointError when they cannot be read, or when ``remembered`` is not what this version of the reader gave.
        """
        ...


class CheckpointReader(Protocol):
    """A container format."""

    name: str

    def detect(self, path: Path) -> Verdict:
        """Whether ``path`` is one, judged by names and first bytes only; a refusal says what is missing."""
        ...

    def open(self, path: Path) -> Checkpoint:
        """Read and check every header. Raises CheckpointError that names file, expected and found."""
        ...

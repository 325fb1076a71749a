"""What a checkpoint is, in words that hold for every family."""

from typing import Literal

from msgspec import Struct

from atlas_core.vocab.dtype import DType


class CacheSpec(Struct, frozen=True):
    """One cache group: layers that share a block table because their caches have one shape.

    ``kind``: full (all positions), sliding (the last ``window`` positions), recurrent. A recurrent group has no pages but
    one float32 state of ``state_shape`` for each layer and slot, however long the sequence.
    """

    group: str
    kind: Literal["full", "sliding", "recurrent"]
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    state_shape: tuple[int, ...] = ()

    @property
    def paged(self) -> bool:
        """Whether its memory grows with the sequence, page by page."""
        return self.kind != "recurrent"


class ModelSpec(Struct, frozen=True):
    """The facts of one model that core needs; the family's own reading stands in ``family``.

    ``eos_token_ids`` are the tokens after which a turn ends. ``family`` is the model plugin's frozen configuration.
    """

    model_type: str
    hidden_size: int
    layers: int
    vocab_size: int
    max_position: int
    dtype: DType
    caches: tuple[CacheSpec, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tied_embeddings: bool
    family: object


class TensorInfo(Struct, frozen=True):
    """One tensor of a checkpoint: ``shape`` outermost first, ``layout`` names a StorageLayout."""

    name: str
    shape: tuple[int, ...]
    layout: str
    nbytes: int

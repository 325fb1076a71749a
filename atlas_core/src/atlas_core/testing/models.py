"""Small models and checkpoints for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from atlas_core.contracts.checkpoint import TokenizerSource
from atlas_core.model.builder import ForwardBuilder
from atlas_core.model.program import Value
from atlas_core.ops.arrays import numpy_dtype
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import CacheSpec, ModelSpec, TensorInfo

Array = np.ndarray[Any, Any]


def tiny_llama_config(**changes: Any) -> dict[str, Any]:
    """A Hugging Face config of a Llama of a few thousand weights; ``changes`` replace or add keys."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
        **changes,
    }  # fmt: skip


class FakeCheckpoint(Struct):
    """A Checkpoint in memory: ``arrays`` are stored as plain ``dtype``."""

    config: Mapping[str, Any]
    arrays: Mapping[str, Array]
    dtype: DType = DType.F32
    naming: str = "hf"
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    source: TokenizerSource | None = None
    path: Path = Path("fake-checkpoint")
    closed: bool = False

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every array under its own name."""
        layout = plain(self.dtype)
        return {n: TensorInfo(n, a.shape, layout.name, layout.nbytes(a.shape)) for n, a in self.arrays.items()}

    def layout(self, name: str) -> StorageLayout:
        """The one layout of this checkpoint. Raises CheckpointError for another name."""
        if name != self.dtype.value:
            raise CheckpointError(f"there is no layout {name}", f"everything is stored as {self.dtype.value}")
        return plain(self.dtype)

    def read(self, name: str, rows: Sequence[tuple[int, int]] | None = None) -> bytes:
        """See Checkpoint."""
        if name not in self.arrays:
            raise CheckpointError(f"there is no tensor {name}", f"there are {', '.join(self.arrays)}")
        array = self.arrays[name]
        if rows is not None:
            array = np.concatenate([array[start:end] for start, end in rows])
        return np.ascontiguousarray(array, numpy_dtype(self.dtype)).tobytes()

    def tokenizer(self) -> TokenizerSource:
        """See Checkpoint."""
        if self.source is None:
            raise CheckpointError("the checkpoint has no tokenizer", "none was given to the fake")
        return self.source

    def close(self) -> None:
        """See Checkpoint."""
        self.closed = True


class ScriptedModel:
    """A model that always continues token t with ``successor[t]``, through every op that a dense decoder needs.

    The embedding of a token is the unit vector of its successor and the head is the identity, times ``sharpness``; one attention
    layer reads and writes the cache and adds nothing, since its values are zero.
    """

    def __init__(self, successor: Sequence[int], eos: Sequence[int] = (), sharpness: float = 20.0) -> None:
        self.successor = tuple(successor)
        self.sharpness = sharpness
        vocab = len(self.successor)
        self.spec = ModelSpec(
            "scripted", vocab, 1, vocab, 4096, DType.F32, (CacheSpec("full", "full", 1, 1, 8),), tuple(eos), None,
            tied_embeddings=False, family=None,
        )  # fmt: skip

    def record(self, spec: ModelSpec, step: ForwardBuilder) -> Value:
        """See ModelWeightLoader."""
        vocab = spec.vocab_size
        h = step.embed(step.weight("embed", vocab, vocab))
        q, k, v = (step.linear(h, step.weight(name, 8, vocab)) for name in ("q", "k", "v"))
        y = step.attention(q, k, v, "full", 0, 1, 8**-0.5)
        h = step.add(h, step.linear(y, step.weight("o", vocab, 8)))
        return step.linear(step.gather_rows(h), step.weight("head", vocab, vocab), DType.F32)

    def weights(self) -> dict[str, Array]:
        """float32 weights by canonical name."""
        vocab = len(self.successor)
        rng = np.random.default_rng(0)
        queries, keys = rng.standard_normal((2, 8, vocab)).astype(np.float32)
        return {
            "embed": np.eye(vocab, dtype=np.float32)[list(self.successor)], "q": queries, "k": keys,
            "v": np.zeros((8, vocab), np.float32), "o": np.ones((vocab, 8), np.float32),
            "head": np.eye(vocab, dtype=np.float32) * np.float32(self.sharpness),
        }  # fmt: skip

    def continuation(self, last: int, tokens: int) -> list[int]:
        """What greedy sampling must give after ``last``."""
        result = []
        for _ in range(tokens):
            last = self.successor[last]
            result.append(last)
        return result

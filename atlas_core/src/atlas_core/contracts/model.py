"""ModelWeightLoader: what a checkpoint of one family means. It records its layers; it never launches anything."""

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from atlas_core.vocab.model import ModelSpec


class ExpertStack(Struct, frozen=True):
    """A weight [experts, rows, columns] in one of the ways in which checkpoints keep it.

    ``separate``: alternatives, each the names of one tensor [rows, columns] for every expert, in order. ``fused``: alternatives of one
    tensor [experts, fused_rows, columns], of which the rows [start, end) in ``part`` of every matrix are meant. A fused
    tensor whose shape has the last two dimensions the other way round is stored transposed; plain arrays only.
    """

    separate: tuple[tuple[str, ...], ...]
    fused: tuple[str, ...] = ()
    fused_rows: int = 0
    part: tuple[int, int] = (0, 0)


class WeightSource(Struct, frozen=True):
    """Where a canonical weight lies in a checkpoint: the first of ``names`` that is present, else ``stack``.

    ``row_order`` gives, for each row of the weight, the row of the file that holds it (None: as stored).
    ``optional`` weights may be absent; ``tied_to`` names the canonical weight to use then. ``offset`` is added to every element of a
    plain array (norms that are stored less one), and ``factor`` multiplies the sum; with ``logarithm`` the weight is log(-element) (rates of decay that are stored
    below zero). Any of these makes it float32.
    """

    names: tuple[str, ...]
    row_order: tuple[int, ...] | None = None
    optional: bool = False
    tied_to: str | None = None
    stack: ExpertStack | None = None
    offset: float = 0.0
    logarithm: bool = False
    factor: float = 1.0

    @property
    def computed(self) -> bool:
        """Whether the weight is not what is stored."""
        return bool(self.offset) or self.logarithm or self.factor != 1.0


class NameMap(Struct, frozen=True):
    """Every weight of the model under its canonical name, and tensors that are known and not used (glob patterns)."""

    weights: Mapping[str, WeightSource]
    ignored: tuple[str, ...] = ()


class ModelWeightLoader(Protocol):
    """One model family. Pure: given values, gives values; the same on every machine."""

    model_type: str

    def read_config(self, config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face config. Every key is consumed or known to be harmless.

        Raises CheckpointError naming the key that is missing, contradictory, unknown or unsupported.
        """
        ...

    def name_map(self, naming: str, spec: ModelSpec) -> NameMap:
        """Where the weights lie under a naming scheme (``hf``, ``gguf``). Raises CheckpointError for an unknown scheme."""
        ...

    def record(self, spec: ModelSpec, step: Any) -> Any:
        """Record the forward pass into ``step``, a model.builder.ForwardBuilder, and return the float32 logits [R, vocabulary].

        The pass ends with ``step.logits``, so that a model that embeds texts can do without the head. Weights are named canonically and with their shapes; a weight of another shape is an error found by the store.
        """
        ...

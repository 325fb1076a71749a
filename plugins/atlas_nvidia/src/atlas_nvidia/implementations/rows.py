"""Ops whose rows are independent, and the bookkeeping at the beginning of a step."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Geometry, f32, i32, ptr
from atlas_nvidia.implementations.base import (
    ELEMENTS,
    VECTOR,
    Implementation,
    addresses,
    live_word,
    no_vector,
    not_fast,
    not_stored,
    other_type,
    ragged,
    spread,
    unbounded,
    vector_type,
)

RESIDUAL = DType.F32
"""The residual stream, whatever the type of activations is."""


class StepBegin(Implementation):
    """One block: updates of slots must be seen by all rows of the step."""

    op, name = "step_begin", "step_begin"
    module, entry = "step", "step_begin"

    def refusals(self, need: OpNeed) -> list[str]:
        """Nothing is refused."""
        return []

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        names = ("updates", "token_ids", "cu_q", "row_slot", "slots", "penalty", "tokens", "positions", "token_row")
        vocabulary = need.operands["penalty"].shape[-1]
        args = [
            ptr(context.counts), *addresses(context, *names), i32(need.attrs["slot_stride"]), i32(vocabulary),
        ]  # fmt: skip
        return self.launch(context, Geometry((1, 1, 1), (1024, 1, 1)), args)


class TakeRows(Implementation):
    """Rows of a table by index, into the residual stream; each subclass says what the table and the index are."""

    module = "elementwise"
    table: str
    index: str

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["y"].shape
        args = [
            ptr(context.counts), live_word(need.operands["y"]), *addresses(context, self.index, self.table, "y"), i32(width),
        ]  # fmt: skip
        return self.launch(context, spread(rows * width // VECTOR), args)


class Embed(TakeRows):
    """Rows of an embedding of 16 bits."""

    op, name, entry, table, index = "embed", "embed", "embed", "weight", "tokens"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, RESIDUAL, "y"), *not_stored(need, "weight", self.element.value),
            *ragged(need, "y"), *unbounded(need, "y"),
        ]  # fmt: skip


class GatherRows(TakeRows):
    """The rows whose logits are wanted: copies, so that they serve exact numerics too."""

    op, name, entry, table, index = "gather_rows", "gather_rows", "gather_rows", "x", "logits_rows"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*other_type(need, RESIDUAL, "x", "y"), *ragged(need, "y"), *unbounded(need, "y")]


class Elementwise(Implementation):
    """Two operands of equal shape make a third, 8 elements a thread."""

    module = "elementwise"
    first: str
    second: str

    def types(self, need: OpNeed) -> list[str]:
        """Refusals of operands of other types than the kernel's."""
        return other_type(need, self.element, self.first, self.second, "y")

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*not_fast(need, self.element), *self.types(need), *ragged(need, "y"), *unbounded(need, "y")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["y"].shape
        args = [
            ptr(context.counts), live_word(need.operands["y"]), *addresses(context, self.first, self.second, "y"), i32(width),
        ]  # fmt: skip
        return self.launch(context, spread(rows * width // VECTOR), args)


class Add(Elementwise):
    """Residual sums."""

    op, name, entry, first, second = "add", "add", "add", "x", "z"

    def types(self, need: OpNeed) -> list[str]:
        """See Elementwise."""
        return [*other_type(need, RESIDUAL, "x", "y"), *other_type(need, self.element, "z")]


class AddActivations(Elementwise):
    """Sums of activations."""

    op, name, entry, first, second = "add", "add_activations", "add_activations", "x", "z"


class SiluMul(Elementwise):
    """SwiGLU."""

    op, name, entry, first, second = "silu_mul", "silu_mul", "silu_mul", "gate", "up"


class GeluMul(Elementwise):
    """GeGLU."""

    op, name, entry, first, second = "gelu_mul", "gelu_mul", "gelu_mul", "gate", "up"


class BiasAdd(Implementation):
    """One vector to every row."""

    op, name = "bias_add", "bias_add"
    module, entry = "elementwise", "bias_add"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, self.element, "x", "y"), *no_vector(need, "bias"),
            *ragged(need, "y"), *unbounded(need, "y"),
        ]  # fmt: skip

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["y"].shape
        args = [
            ptr(context.counts), live_word(need.operands["y"]), *addresses(context, "x", "bias", "y"), i32(width),
            vector_type(need, "bias"),
        ]  # fmt: skip
        return self.launch(context, spread(rows * width // VECTOR), args)


class RmsNorm(Implementation):
    """One block a row of the residual stream."""

    op, name = "rms_norm", "rms_norm"
    module, entry = "rms_norm", "rms_norm"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [
            *not_fast(need, self.element), *other_type(need, RESIDUAL, "x"), *other_type(need, self.element, "y"),
            *no_vector(need, "weight"), *ragged(need, "y"), *unbounded(need, "y"),
        ]  # fmt: skip

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, width = need.operands["y"].shape
        args = [
            ptr(context.counts), live_word(need.operands["y"]), *addresses(context, "x", "weight", "y"), i32(width),
            f32(need.attrs["eps"]), vector_type(need, "weight"),
        ]  # fmt: skip
        return self.launch(context, Geometry((rows, 1, 1), (256, 1, 1)), args)


class Rope(Implementation):
    """One thread a pair of dimensions."""

    op, name = "rope", "rope"
    module, entry = "rope", "rope"

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        return [*not_fast(need, self.element), *other_type(need, self.element, "x", "y")]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        heads, dim, half = need.attrs["heads"], need.attrs["head_dim"], need.operands["inv_freq"].shape[0]
        args = [
            ptr(context.counts), *addresses(context, "x", "positions", "inv_freq", "y"), i32(heads), i32(dim), i32(half),
            f32(need.attrs["scale"]),
        ]  # fmt: skip
        return self.launch(context, spread(need.tokens * heads * (dim - half)), args)


ALL: tuple[OpImplementation, ...] = (
    StepBegin(), GatherRows(),
    *(make(element) for element in ELEMENTS for make in (Embed, Add, AddActivations, SiluMul, GeluMul, BiasAdd, RmsNorm, Rope)),
)  # fmt: skip

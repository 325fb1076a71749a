"""The ops around the forward pass: the step's beginning, and the way from logits to the next token."""

from atlas_core.contracts.ops import BindContext, OpNeed
from atlas_core.vocab.kernel import Arg, i32, ptr
from atlas_plugin_cpu.base import CpuImplementation, addresses, ints

_CANDIDATE_BYTES = 8
_MAX_SAMPLING_TASKS = 16
_COLUMNS_A_TASK = 4096


class StepBegin(CpuImplementation):
    """One task: updates come in order."""

    op, module = "step_begin", "step"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        inputs = ("updates", "token_ids", "cu_q", "row_slot", "slots", "penalty")
        operands = addresses(context, *inputs, "tokens", "positions", "token_row")
        return (*operands, *ints(need, "slot_stride"), i32(need.operands["penalty"].shape[1]))


class ProcessLogits(CpuImplementation):
    """Tasks share out the vocabulary, so that a single row keeps every thread busy."""

    op, module = "process_logits", "sampling"

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        return max(1, min(context.workers, need.operands["logits"].shape[1] // _COLUMNS_A_TASK))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "logits", "sample_row", "row_slot", "slots", "penalty", "mask", "y")
        shapes = i32(need.operands["logits"].shape[1]), i32(need.operands["mask"].shape[1])
        return (*operands, *shapes, *ints(need, "slot_stride", "bias_start"))


class Sample(CpuImplementation):
    """Sorts only the tokens that can pass top-k and top-p."""

    op, module = "sample", "sampling"

    def scratch_bytes(self, need: OpNeed) -> int:
        """A list of candidates as long as the vocabulary, for each row that may be worked on at once."""
        return min(need.rows, _MAX_SAMPLING_TASKS) * self._list_bytes(need)

    @staticmethod
    def _list_bytes(need: OpNeed) -> int:
        return need.operands["logits"].shape[1] * _CANDIDATE_BYTES

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        return max(1, min(need.rows, _MAX_SAMPLING_TASKS, context.workers))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "logits", "sample_row", "row_slot", "cu_q", "slots", "sampled")
        return (
            *operands,
            ptr(context.scratch.address),
            i32(need.operands["logits"].shape[1]),
            *ints(need, "slot_stride"),
        )


class Logprobs(CpuImplementation):
    """One pass for the sum and the best tokens together."""

    op, module = "logprobs", "sampling"

    def _tasks(self, need: OpNeed, context: BindContext) -> int:
        return max(1, min(need.rows, context.workers))

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        operands = addresses(context, "logits", "sampled", "scored", "sample_row", "row_slot", "slots", "values", "ids")
        return (*operands, i32(need.operands["logits"].shape[1]), *ints(need, "slot_stride"))


class Advance(CpuImplementation):
    """One task."""

    op, module = "advance", "step"

    def _arguments(self, need: OpNeed, context: BindContext) -> tuple[Arg, ...]:
        return (*addresses(context, "sampled", "sample_row", "row_slot", "cu_q", "slots"), *ints(need, "slot_stride"))

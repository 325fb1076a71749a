"""From logits to the next token. Integers and float32 only, so these serve exact numerics too."""

from collections.abc import Sequence

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed
from atlas_core.vocab.kernel import Arg, Geometry, LaunchAttrs, i32, ptr
from atlas_nvidia.implementations.base import Implementation, addresses

CHUNK = 2048
ROW_BLOCKS = 8
ROW_THREADS = 512
MAX_VOCABULARY = 1 << 24


class ProcessLogits(Implementation):
    """A block for each 2048 tokens of a row."""

    op, name = "process_logits", "process_logits"
    module, entry = "process_logits", "process_logits"

    def refusals(self, need: OpNeed) -> list[str]:
        """Nothing is refused."""
        return []

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, vocabulary = need.operands["logits"].shape
        names = ("logits", "sample_row", "row_slot", "slots", "penalty", "mask", "y")
        args = [
            ptr(context.counts), *addresses(context, *names), i32(vocabulary), i32(need.attrs["slot_stride"]),
            i32(need.attrs["bias_start"]), i32(0),
        ]  # fmt: skip
        return self.launch(context, Geometry((-(-vocabulary // CHUNK), rows, 1), (256, 1, 1)), args)


class _RowCluster(Implementation):
    """A cluster of 8 blocks for each row of logits."""

    def arguments(self, context: BindContext) -> list[Arg]:
        """Between the live counts and the vocabulary."""
        raise NotImplementedError

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        vocabulary = need.operands["logits"].shape[1]
        return [] if vocabulary <= MAX_VOCABULARY else [f"{vocabulary} token ids do not fit into 24 bits"]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, vocabulary = need.operands["logits"].shape
        args = [ptr(context.counts), *self.arguments(context), i32(vocabulary), i32(need.attrs["slot_stride"])]
        geometry = Geometry((ROW_BLOCKS * rows, 1, 1), (ROW_THREADS, 1, 1))
        return self.launch(context, geometry, args, cluster=(ROW_BLOCKS, 1, 1))


class Sample(_RowCluster):
    """Greedy and filtered sampling without a sort."""

    op, name = "sample", "sample"
    module, entry = "sample", "sample"

    def arguments(self, context: BindContext) -> list[Arg]:
        """See _RowCluster."""
        rest = addresses(context, "sample_row", "row_slot", "cu_q", "slots", "sampled")
        return [*addresses(context, "logits"), ptr(0), *rest]


class ProcessSample(_RowCluster):
    """Only rows with bias, mask or penalties are processed, into scratch; the others are sampled as they are."""

    op, name = "process_sample", "process_sample"
    module, entry = "sample", "sample"

    def __init__(self) -> None:
        super().__init__()
        self.kernels = (("process_logits", "process_logits"), ("sample", "sample"))

    def scratch_bytes(self, need: OpNeed) -> int:
        """Processed logits."""
        rows, vocabulary = need.operands["logits"].shape
        return 4 * rows * vocabulary

    def arguments(self, context: BindContext) -> list[Arg]:
        """See _RowCluster."""
        rest = addresses(context, "sample_row", "row_slot", "cu_q", "slots", "sampled")
        return [ptr(context.scratch.address), *addresses(context, "logits"), *rest]

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        rows, vocabulary = need.operands["logits"].shape
        args = [
            ptr(context.counts), *addresses(context, "logits", "sample_row", "row_slot", "slots", "penalty", "mask"),
            ptr(context.scratch.address), i32(vocabulary), i32(need.attrs["slot_stride"]), i32(need.attrs["bias_start"]), i32(1),
        ]  # fmt: skip
        kernel, geometry = (
            context.backend.kernel(*self.kernels[0]),
            Geometry((-(-vocabulary // CHUNK), rows, 1), (256, 1, 1)),
        )
        process = context.backend.prepare_launch(kernel, geometry, args, LaunchAttrs(overlap=True))
        return (process, *super().bind(need, context))


class Logprobs(_RowCluster):
    """The best are found one after another: there are 20 at most."""

    op, name = "logprobs", "logprobs"
    module, entry = "logprobs", "logprobs"

    def arguments(self, context: BindContext) -> list[Arg]:
        """See _RowCluster."""
        return addresses(context, "logits", "sampled", "scored", "sample_row", "row_slot", "slots", "values", "ids")


class Advance(Implementation):
    """One block."""

    op, name = "advance", "advance"
    module, entry = "step", "advance"

    def refusals(self, need: OpNeed) -> list[str]:
        """Nothing is refused."""
        return []

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        names = ("sampled", "sample_row", "row_slot", "cu_q", "slots")
        args = [ptr(context.counts), *addresses(context, *names), i32(need.attrs["slot_stride"])]
        return self.launch(context, Geometry((1, 1, 1), (256, 1, 1)), args)


ALL: tuple[OpImplementation, ...] = (ProcessLogits(), Sample(), ProcessSample(), Logprobs(), Advance())

"""What the runtime needs of a plan: the shape of the planner's results, seen from below the planner."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from atlas_core.contracts.ops import OpImplementation, OpNeed, Packed


class NamedValue(Protocol):
    """A value of the program."""

    @property
    def name(self) -> str:
        """Unique in the program."""
        ...

    @property
    def kind(self) -> str:
        """activation, weight, constant, input, state or cache."""
        ...


class PlanNode(Protocol):
    """A node of the plan, fused or not."""

    @property
    def operands(self) -> Mapping[str, NamedValue]:
        """Values by the op's operand names."""
        ...


class PlanStep(Protocol):
    """One node with the implementation that runs it."""

    @property
    def node(self) -> PlanNode:
        """What is run."""
        ...

    @property
    def need(self) -> OpNeed:
        """What the implementation was asked."""
        ...

    @property
    def implementation(self) -> OpImplementation:
        """Who runs it."""
        ...

    @property
    def packings(self) -> Mapping[str, Packed]:
        """The packing of each weight operand."""
        ...


class PlanSegment(Protocol):
    """Steps that become one graph."""

    @property
    def name(self) -> str:
        """The segment's name: forward, sample."""
        ...

    @property
    def steps(self) -> Sequence[PlanStep]:
        """In the order of execution."""
        ...


class Placement(Protocol):
    """Where the activations of a bucket lie."""

    @property
    def offsets(self) -> Mapping[str, int]:
        """Byte offset of each activation in the arena."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        ...

    @property
    def scratch(self) -> int:
        """The largest scratch of any step."""
        ...

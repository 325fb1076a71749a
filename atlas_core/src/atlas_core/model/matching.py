"""Finding fused ops in a program: exact sequences of recorded nodes with exactly the decomposition's data flow."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.contracts.ops import FusedOp
from atlas_core.model.program import Node, Program, Value
from atlas_core.ops.contract import Op
from atlas_core.ops.fused import compose, unrolled


class Pattern(Struct, frozen=True):
    """A fused op ready to be matched: its decomposition and the op that it composes.

    ``parts`` gives for each operand the primitive that uses it first.
    """

    fused: FusedOp
    op: Op
    parts: Mapping[str, str]
    ops: Mapping[str, Op]

    @classmethod
    def of(cls, fused: FusedOp, ops: Mapping[str, Op]) -> "Pattern":
        """Compose the op; of a chain it is one link. Raises ValueError for an ill-formed decomposition."""
        parts = {call.operands[inner]: call.op for call in reversed(fused.body) for inner in call.operands}
        link = fused
        if fused.carried:
            compose(unrolled(fused, 1, ops), ops)
            link = replace(fused, outputs=fused.carried[1:])
        return cls(fused, compose(link, ops), parts, ops)

    def find(self, nodes: Sequence[Node], start: int, end: int, uses: "Uses") -> "tuple[Pattern, Node] | None":
        """What may stand for nodes from ``start`` on: the pattern as it matches there, and the fused node.

        A chain is found whole, at its first link, or not at all.
        """
        if self.fused.carried is None:
            node = match(self, nodes, start, end, uses)
            return (self, node) if node else None
        length, links, first = len(self.fused.body), 0, start + len(self.fused.before)
        if not self.fused.before and start >= length and match(self, nodes, start - length, end, uses):
            return None
        while match(self, nodes, first + links * length, end, uses):
            links += 1
        if not links:
            return None
        whole = Pattern.of(unrolled(self.fused, links, self.ops), self.ops)
        node = match(whole, nodes, start, end, uses)
        return (whole, node) if node else None


class Uses:
    """Where each value of a program is used; answers whether a value is seen outside a range of nodes."""

    def __init__(self, program: Program) -> None:
        self._at: dict[str, list[int]] = {}
        for index, node in enumerate(program.nodes):
            for value in node.operands.values():
                self._at.setdefault(value.name, []).append(index)
        self._results = {value.name for value in program.results}

    def outside(self, name: str, start: int, end: int) -> bool:
        """Whether ``name`` is a result, or an operand of a node before ``start`` or from ``end`` on."""
        return name in self._results or any(index < start or index >= end for index in self._at[name])


def match(pattern: Pattern, nodes: Sequence[Node], start: int, end: int, uses: Uses) -> Node | None:
    """The fused node that may stand for nodes [start, start + length), or None; never crosses ``end``."""
    body = pattern.fused.body
    if start + len(body) > end:
        return None
    values: dict[str, Value] = {}
    attrs: dict[str, Any] = {}
    for call, node in zip(body, nodes[start : start + len(body)], strict=True):
        if node.op.name != call.op or set(call.attrs) != set(node.op.attrs):
            return None
        for inner, outer in call.operands.items():
            if values.setdefault(outer, node.operands[inner]) != node.operands[inner]:
                return None
        for inner, outer in call.attrs.items():
            if attrs.setdefault(outer, node.attrs[inner]) != node.attrs[inner]:
                return None
    if len({value.name for value in values.values()}) != len(values):
        return None  # two names of the pattern fell on one value: not the data flow that was declared
    # In the op's order, not that of a set: what is packed, and what it is called, must be the same in every process.
    kept = [operand.name for operand in pattern.op.operands]
    for outer, value in values.items():
        if outer not in kept and uses.outside(value.name, start, start + len(body)):
            return None
    return Node(pattern.op, {name: values[name] for name in kept}, attrs)

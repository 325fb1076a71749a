"""Fused ops: an op made of a straight sequence of primitives, which is at once its pattern and its reference."""

from collections.abc import Mapping
from typing import Any

from atlas_core.contracts.ops import FusedCall, FusedOp
from atlas_core.ops.contract import Arrays, Op, Operand, Tolerance
from atlas_core.vocab.dtype import DType


def compose(fused: FusedOp, ops: Mapping[str, Op]) -> Op:
    """The op that a decomposition defines.

    Operands are those that exist outside: in order of first appearance, without internal ones. The tolerance is the sum of the
    parts' tolerances. Raises ValueError when an output is never produced or a name has two kinds.
    """
    operands: dict[str, Operand] = {}
    produced: set[str] = set()
    within = False
    for call in fused.body:
        for part in ops[call.op].operands:
            name = call.operands[part.name]
            if part.role == "out":
                produced.add(name)
                if name not in fused.outputs:
                    within = within or (part.kind == "activation" and part.dtype is None)
                    continue
            elif name in produced:
                continue
            known = operands.get(name)
            if known is None or (known.role == "in" and part.role == "inout"):
                operands[name] = Operand(name, part.kind, part.role, part.dtype)
            elif known.kind != part.kind:
                raise ValueError(f"{fused.name}: {name} is both {known.kind} and {part.kind}")
    missing = set(fused.outputs) - produced
    if missing:
        raise ValueError(f"{fused.name} never produces {sorted(missing)}")
    attrs = tuple(dict.fromkeys(name for call in fused.body for name in call.attrs.values()))

    def reference(arrays: Arrays, values: Mapping[str, Any]) -> None:
        local = dict(arrays)
        for call in fused.body:
            part = {inner: local[outer] for inner, outer in call.operands.items() if outer in local}
            ops[call.op].reference(part, {inner: values[outer] for inner, outer in call.attrs.items()})
            local.update({outer: part[inner] for inner, outer in call.operands.items()})
        arrays.update({name: local[name] for name in operands})

    return Op(
        fused.name, tuple(operands.values()), attrs, reference, _tolerances(fused, ops), summary=_summary(fused),
        fast_of_row=sum(ops[call.op].fast_of_row for call in fused.body),
        within=within,
    )  # fmt: skip


PLACE = "layer"
"""The attribute that says where in a cache a node works: the one in which the links of a chain differ."""


def unrolled(fused: FusedOp, links: int, ops: Mapping[str, Op]) -> FusedOp:
    """The chain of so many links of ``fused``, whose ``carried`` is set, as one plain sequence, with what comes before and after."""
    assert fused.carried is not None
    given, left = fused.carried
    kinds = {
        call.operands[part.name]: part.kind if part.role == "in" else "activation"
        for call in fused.body
        for part in ops[call.op].operands
        if part.role == "out" or part.kind == "weight"
    }

    def renamed(name: str, link: int) -> str:
        if name == given:
            return given if link == 0 else renamed(left, link - 1)
        return f"{name}.{link}" if name in kinds and not (name == left and link == links - 1) else name

    body = tuple(
        FusedCall(
            call.op,
            {inner: renamed(outer, link) for inner, outer in call.operands.items()},
            {inner: f"{outer}.{link}" if inner == PLACE else outer for inner, outer in call.attrs.items()},
        )
        for link in range(links)
        for call in fused.body
    )
    return FusedOp(fused.name, (*fused.before, *body, *fused.after), fused.outputs)


def _tolerances(fused: FusedOp, ops: Mapping[str, Op]) -> dict[DType, Tolerance]:
    total: dict[DType, Tolerance] = {}
    for dtype in (DType.F32, DType.BF16, DType.F16):
        parts = [ops[call.op].tolerances[dtype] for call in fused.body if dtype in ops[call.op].tolerances]
        total[dtype] = Tolerance(sum(p.relative for p in parts), sum(p.absolute for p in parts))
    return total


def _summary(fused: FusedOp) -> str:
    return " → ".join(call.op for call in fused.body)

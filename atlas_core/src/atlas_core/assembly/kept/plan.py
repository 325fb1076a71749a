"""A StepPlan into tables and out of them again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_core.assembly.kept.tables import (
    BucketRow,
    Names,
    NeedRow,
    NodeRow,
    Rows,
    StepRow,
    Table,
    Tables,
    plain,
    restored,
)
from atlas_core.assembly.machine import Machine
from atlas_core.assembly.plan import PlannedBucket, StepPlan
from atlas_core.contracts.ops import FusedOp, OperandSpec, OpImplementation, OpNeed, Packed
from atlas_core.model.matching import Pattern
from atlas_core.model.planner import Choices, PlannedSegment, Step
from atlas_core.model.program import Node, Program, Value
from atlas_core.ops.contract import Op
from atlas_core.ops.fused import unrolled
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.resolve import Candidate


def tabled(plan: StepPlan) -> Tables:
    """The plan as tables. Raises TypeError when an attribute is of a kind that cannot be kept."""
    made = _Making()
    program = plan.program
    recorded = made.nodes.all(map(made.node, program.nodes))
    buckets = tuple(
        BucketRow(
            planned.bucket,
            tuple((segment.name, made.steps.all(map(made.step, segment.steps))) for segment in planned.segments),
            planned.arena,
        )
        for planned in plan.buckets
    )
    results = made.values.all(program.results)
    constants = tuple((name, array.shape, array.astype("<f4").tobytes()) for name, array in program.constants.items())
    chosen = tuple((w, part, made.packings.of(packed)) for (w, part), packed in plan.choices.packings.items())
    weights = tuple((name, made.layouts.of(layout)) for name, layout in plan.weights.items())
    return Tables(
        plan.settings, plan.max_seq_len, plan.layout, made.rows(), recorded, program.segments, results, constants, buckets,
        chosen, dict(plan.choices.caches), weights,
    )  # fmt: skip


class _Making:
    """The tables while they are made."""

    def __init__(self) -> None:
        self.names: Table[Names] = Table()
        self.attrs: Table[dict[str, Any]] = Table()
        self.values: Table[Value] = Table()
        self.specs: Table[OperandSpec] = Table()
        self.packings: Table[Packed] = Table()
        self.candidates: Table[Candidate] = Table()
        self.layouts: Table[StorageLayout] = Table()
        self.nodes: Table[NodeRow] = Table()
        self.needs: Table[NeedRow] = Table()
        self.steps: Table[StepRow] = Table()

    def rows(self) -> Rows:
        """All of them."""
        return Rows(
            tuple(self.names.rows), tuple(self.attrs.rows), tuple(self.values.rows), tuple(self.specs.rows),
            tuple(self.packings.rows), tuple(self.candidates.rows), tuple(self.layouts.rows), tuple(self.nodes.rows),
            tuple(self.needs.rows), tuple(self.steps.rows),
        )  # fmt: skip

    def node(self, node: Node) -> NodeRow:
        names, values = self.names.of(tuple(node.operands)), self.values.all(node.operands.values())
        return NodeRow(node.op.name, names, values, self.attrs.of(plain(node.attrs)))

    def need(self, need: OpNeed) -> NeedRow:
        names, specs = self.names.of(tuple(need.operands)), self.specs.all(need.operands.values())
        return NeedRow(
            need.op, names, specs, self.attrs.of(plain(need.attrs)), need.arch, need.numerics, need.tokens, need.sequences,
            need.rows, need.max_query, need.kv, need.activation, need.processors,
        )  # fmt: skip

    def step(self, step: Step) -> StepRow:
        parts = self.names.of(tuple(step.parts)), self.names.of(tuple(step.parts.values()))
        return StepRow(
            self.nodes.of(self.node(step.node)), self.needs.of(self.need(step.need)), step.implementation.name,
            self.names.of(tuple(step.packings)), self.packings.all(step.packings.values()), parts,
            self.names.of(step.replaces), self.candidates.all(step.rejected),
        )  # fmt: skip


def planned(tables: Tables, machine: Machine, ops: Mapping[str, Op], own: Sequence[OpImplementation]) -> StepPlan:
    """The plan, with ``ops`` and implementations of the model's plugin (``own``) and of the machine.

    Raises KeyError or IndexError when tables name what is not there.
    """
    implementations = {each.name: each for each in (*reversed(machine.implementations), *reversed(own))}
    fused = _Fused({each.name: each for each in machine.fused})
    rows = tables.rows
    attrs = [restored(row) for row in rows.attrs]
    names, values, specs, packings = rows.names, rows.values, rows.specs, rows.packings

    def node(row: NodeRow, op: Op) -> Node:
        return Node(
            op, dict(zip(names[row.names], map(values.__getitem__, row.operands), strict=True)), attrs[row.attrs]
        )

    needs = [
        OpNeed(
            row.op, dict(zip(names[row.names], map(specs.__getitem__, row.specs), strict=True)), attrs[row.attrs], row.arch,
            row.numerics, row.tokens, row.sequences, row.rows, row.max_query, row.kv, row.activation, row.processors,
        )
        for row in rows.needs
    ]  # fmt: skip

    def step(row: StepRow) -> Step:
        replaces, of = names[row.replaces], rows.nodes[row.node]
        op = ops[of.op] if replaces == (of.op,) else fused.op(of.op, len(replaces))
        return Step(
            node(of, op), needs[row.need], implementations[row.implementation],
            dict(zip(names[row.packed], map(packings.__getitem__, row.packings), strict=True)),
            dict(zip(names[row.parts[0]], names[row.parts[1]], strict=True)), replaces,
            tuple(map(rows.candidates.__getitem__, row.rejected)),
        )  # fmt: skip

    steps = [step(row) for row in rows.steps]
    buckets = tuple(
        PlannedBucket(
            row.bucket,
            tuple(PlannedSegment(name, tuple(map(steps.__getitem__, found))) for name, found in row.segments),
            row.arena,
        )
        for row in tables.buckets
    )
    recorded = [node(rows.nodes[at], ops[rows.nodes[at].op]) for at in tables.recorded]
    constants = {name: np.frombuffer(data, "<f4").reshape(shape) for name, shape, data in tables.constants}
    program = Program(tuple(recorded), tables.segments, tuple(values[at] for at in tables.results), constants)
    choices = Choices({(weight, part): packings[at] for weight, part, at in tables.chosen}, tables.caches)
    weights = {name: rows.layouts[at] for name, at in tables.weights}
    return StepPlan(tables.settings, tables.max_seq_len, tables.layout, program, buckets, choices, weights)


class _Fused:
    """Fused ops by name and length, each composed once."""

    def __init__(self, declared: Mapping[str, FusedOp]) -> None:
        self._declared = declared
        self._ops: dict[tuple[str, int], Op] = {}

    def op(self, name: str, length: int) -> Op:
        """The op that stands for so many nodes. Raises KeyError for an unknown one."""
        known = self._ops.get((name, length))
        if known is None:
            known = self._ops[name, length] = self._composed(self._declared[name], length)
        return known

    def _composed(self, fused: FusedOp, length: int) -> Op:
        if fused.carried is not None:
            links = (length - len(fused.before) - len(fused.after)) // len(fused.body)
            fused = unrolled(fused, links, PRIMITIVES)
        return Pattern.of(fused, PRIMITIVES).op

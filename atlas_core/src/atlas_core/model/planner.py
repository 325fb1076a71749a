"""The planner: covers a step program with implementations, once, and says why each one was taken.

At each place in the program the longest fused op that matches and is supported wins; ties go to the higher rank. The first bucket
planned decides how each weight is packed and how pages are laid out; later buckets must accept that, so that one packed copy
serves every number of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atlas_core.contracts.ops import KVLayout, OperandSpec, OpImplementation, OpNeed, Packed
from atlas_core.model.matching import Pattern, Uses, match
from atlas_core.model.program import Dim, Node, Program, Value
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.resolve import Candidate, Resolution, resolve
from atlas_core.vocab.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Bucket:
    """The largest live counts that one captured graph serves. ``max_query`` 1 means every sequence brings one token."""

    tokens: int
    sequences: int
    rows: int
    updates: int
    max_query: int

    def extent(self, dim: Dim) -> int:
        """A symbolic dimension at its largest."""
        if isinstance(dim, int):
            return dim
        return {"T": self.tokens, "S": self.sequences, "S+1": self.sequences + 1, "R": self.rows, "U": self.updates}[
            dim
        ]

    def shape(self, value: Value) -> tuple[int, ...]:
        """A value's shape at its largest."""
        return tuple(self.extent(dim) for dim in value.shape)


@dataclass(frozen=True, slots=True)
class Step:
    """One node of the plan: what runs, how, instead of which primitives, and who else was asked.

    ``parts`` gives for each operand the primitive that uses it first (the node's own op when nothing was fused).
    """

    node: Node
    need: OpNeed
    implementation: OpImplementation
    packings: Mapping[str, Packed]
    parts: Mapping[str, str]
    replaces: tuple[str, ...]
    rejected: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """The steps of one segment of the program."""

    name: str
    steps: tuple[Step, ...]


@dataclass
class Choices:
    """What all buckets share: the packing of each (weight, primitive op) and the layout of each cache group."""

    packings: dict[tuple[str, str], Packed] = field(default_factory=dict)
    caches: dict[str, KVLayout] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """What the planner knows besides the program. ``layouts`` gives the storage of every weight by name."""

    arch: str
    numerics: str
    activation: DType
    layouts: Mapping[str, StorageLayout]
    implementations: Sequence[OpImplementation]
    patterns: Sequence[Pattern]


def plan(program: Program, bucket: Bucket, context: Context, choices: Choices) -> tuple[PlannedSegment, ...]:
    """Cover every segment; fills ``choices`` where they are still open.

    Raises ResolveError naming the op, its shapes and every implementation's reasons when a node cannot be covered.
    """
    planner = _Planner(program, bucket, context, choices)
    return tuple(PlannedSegment(s.name, planner.cover(s.start, s.end)) for s in program.segments)


class _Planner:
    def __init__(self, program: Program, bucket: Bucket, context: Context, choices: Choices) -> None:
        self._program = program
        self._bucket = bucket
        self._context = context
        self._choices = choices
        self._uses = Uses(program)
        self._patterns = sorted(context.patterns, key=lambda p: -len(p.fused.body))

    def cover(self, start: int, end: int) -> tuple[Step, ...]:
        """Steps for nodes [start, end)."""
        steps = []
        while start < end:
            step = self._longest(start, end)
            self._settle(step)
            steps.append(step)
            start += len(step.replaces)
        return tuple(steps)

    def _longest(self, start: int, end: int) -> Step:
        refused: list[Candidate] = []
        best: tuple[int, Step] | None = None
        for pattern in self._patterns:
            if best and len(pattern.fused.body) < len(best[1].replaces):
                break
            node = match(pattern, self._program.nodes, start, end, self._uses)
            if node is None:
                continue
            parts = {call.operands[inner]: call.op for call in reversed(pattern.fused.body) for inner in call.operands}
            resolution = self._resolve(node, parts)
            if resolution.winner is None:
                refused += resolution.candidates
            elif best is None or resolution.rank > best[0]:
                best = resolution.rank, self._step(node, parts, pattern, resolution, refused)
        if best:
            return best[1]
        node = self._program.nodes[start]
        parts = {operand.name: node.op.name for operand in node.op.operands}
        resolution = self._resolve(node, parts)
        shapes = ", ".join(f"{name} {list(self._bucket.shape(value))}" for name, value in node.operands.items())
        resolution.require(
            f"no kernel runs {node.op.name} on {self._context.arch} with {self._context.numerics} numerics ({shapes})",
            "choose another --hardware or --numerics, or install a plugin that has such a kernel",
        )
        return self._step(node, parts, None, resolution, refused)

    def _resolve(self, node: Node, parts: Mapping[str, str]) -> Resolution[OpImplementation]:
        candidates = [(i.name, i) for i in self._context.implementations if i.op == node.op.name]
        return resolve(candidates, lambda implementation: self._ask(implementation, node, parts))

    def _step(
        self, node: Node, parts: Mapping[str, str], pattern: Pattern | None, resolution: Resolution[OpImplementation],
        refused: Sequence[Candidate],
    ) -> Step:  # fmt: skip
        implementation = resolution.require(node.op.name, "")
        need = self._need(node, implementation)
        replaces = tuple(call.op for call in pattern.fused.body) if pattern else (node.op.name,)
        packings = self._packings(implementation, node, need)
        return Step(node, need, implementation, packings, parts, replaces, (*refused, *resolution.rejected))

    def _ask(self, implementation: OpImplementation, node: Node, parts: Mapping[str, str]) -> Verdict:
        """An implementation's verdict, given what other nodes and buckets have already settled."""
        need = self._need(node, implementation)
        if any(value.kind == "cache" for value in node.operands.values()) and need.kv is None:
            return Verdict.no(f"cannot use pages of {need.attrs['page_tokens']} tokens laid out as already chosen")
        verdict = implementation.supports(need)
        if not verdict.ok:
            return verdict
        for operand, packed in self._packings(implementation, node, need).items():
            weight = node.operands[operand].name
            settled = self._choices.packings.get((weight, parts[operand]))
            if settled and settled.name != packed.name:
                return Verdict.no(f"reads {weight} packed as {packed.name}, and it is packed as {settled.name}")
        return verdict

    def _need(self, node: Node, implementation: OpImplementation) -> OpNeed:
        """The need as this implementation would see it: with the settled cache layout, or its own first choice."""
        bucket = self._bucket
        operands = {name: self._spec(value) for name, value in node.operands.items()}
        need = OpNeed(
            node.op.name, operands, node.attrs, self._context.arch, self._context.numerics,
            bucket.tokens, bucket.sequences, bucket.rows, bucket.max_query,
        )  # fmt: skip
        for name, value in node.operands.items():
            if value.kind == "cache":
                settled = self._choices.caches.get(value.name)
                offered = [k for k in implementation.kv_layouts(need) if settled is None or k.name == settled.name]
                if offered:
                    spec = replace(operands[name], dtype=offered[0].dtype)
                    need = replace(need, kv=offered[0].name, operands={**operands, name: spec})
        return need

    def _spec(self, value: Value) -> OperandSpec:
        shape = self._bucket.shape(value)
        if value.kind == "weight":
            layout = self._context.layouts[value.name]
            return OperandSpec(shape, layout.scalar or DType.U8, layout)
        live = "" if not shape or isinstance(value.shape[0], int) else value.shape[0]
        return OperandSpec(shape, value.dtype or self._context.activation, live=live)

    def _packings(self, implementation: OpImplementation, node: Node, need: OpNeed) -> dict[str, Packed]:
        """The packing of every weight operand: what the implementation asks for, else as stored."""
        asked = implementation.packings(need)
        result = {}
        for name, value in node.operands.items():
            if value.kind == "weight":
                layout = self._context.layouts[value.name]
                result[name] = asked.get(name) or Packed(
                    f"stored:{layout.name}", layout.nbytes(need.operands[name].shape)
                )
        return result

    def _settle(self, step: Step) -> None:
        """Bind later nodes and buckets to what this step decided."""
        for name, value in step.node.operands.items():
            if value.kind == "cache" and value.name not in self._choices.caches:
                layouts = {layout.name: layout for layout in step.implementation.kv_layouts(step.need)}
                self._choices.caches[value.name] = layouts[step.need.kv or ""]
            if value.kind == "weight":
                self._choices.packings.setdefault((value.name, step.parts[name]), step.packings[name])

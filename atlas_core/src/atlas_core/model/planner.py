"""The planner: covers a step program with implementations, once, and says why each one was taken.

At each place in the program the longest fused op that matches and is supported wins; ties go to the higher rank. The first bucket
planned decides how each weight is packed and how pages are laid out; later buckets must accept that, so that one packed copy
serves every number of rows.
"""

from collections.abc import Hashable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from atlas_core.contracts.ops import KVLayout, OperandSpec, OpImplementation, OpNeed, Packed
from atlas_core.model.matching import Pattern, Uses
from atlas_core.model.program import Dim, Node, Program, Value
from atlas_core.ops.fused import PLACE
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.resolve import Candidate, Resolution, resolve
from atlas_core.vocab.verdict import Verdict


class Bucket(Struct, frozen=True):
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


class Step(Struct, frozen=True):
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


class PlannedSegment(Struct, frozen=True):
    """The steps of one segment of the program."""

    name: str
    steps: tuple[Step, ...]


class Choices(Struct):
    """What all buckets share: the packing of each (weight, primitive op) and the layout of each cache group."""

    packings: dict[tuple[str, str], Packed] = field(default_factory=dict)
    caches: dict[str, KVLayout] = field(default_factory=dict)


class Context(Struct, frozen=True):
    """What the planner knows besides the program. ``layouts`` gives the storage of every weight by name."""

    arch: str
    numerics: str
    activation: DType
    layouts: Mapping[str, StorageLayout]
    implementations: Sequence[OpImplementation]
    patterns: Sequence[Pattern]
    processors: int | None = None


def plan(program: Program, bucket: Bucket, context: Context, choices: Choices) -> tuple[PlannedSegment, ...]:
    """Cover every segment for one bucket; see ``Planner.plan``."""
    return Planner(program, context, choices).plan(bucket)


class _Asked(Struct, frozen=True):
    """What one implementation says to one need; ``packings`` are asked for only when it accepts."""

    implementation: OpImplementation
    need: OpNeed
    verdict: Verdict
    packings: Mapping[str, Packed]


class _Match(Struct, frozen=True):
    """One way to run what begins at a node: ``pattern`` None is the node itself. ``key`` is equal for nodes of equal needs."""

    node: Node
    pattern: Pattern | None
    parts: Mapping[str, str]
    replaces: tuple[str, ...]
    key: Hashable


class Planner:
    """Plans one program for many buckets. Layers repeat, so that equal needs are asked about once."""

    def __init__(self, program: Program, context: Context, choices: Choices) -> None:
        """``choices`` is filled where it is still open."""
        self._program = program
        self._context = context
        self._choices = choices
        self._uses = Uses(program)
        self._patterns: dict[str, list[Pattern]] = {}
        for pattern in context.patterns:
            first = (*pattern.fused.before, *pattern.fused.body)[0]
            self._patterns.setdefault(first.op, []).append(pattern)
        self._by_op: dict[str, list[OpImplementation]] = {}
        for implementation in context.implementations:
            self._by_op.setdefault(implementation.op, []).append(implementation)
        self._fused: dict[tuple[int, int], Sequence[_Match]] = {}
        self._alone: dict[int, _Match] = {}
        self._kinds: dict[Hashable, int] = {}
        self._signatures: dict[str, int] = {}
        self._bucket = Bucket(0, 0, 0, 0, 0)
        self._answers: dict[Hashable, tuple[_Asked, ...]] = {}
        self._resolutions: dict[Hashable, Resolution[_Asked]] = {}

    def plan(self, bucket: Bucket) -> tuple[PlannedSegment, ...]:
        """Cover every segment.

        Raises ResolveError naming the op, its shapes and every implementation's reasons when a node cannot be covered.
        """
        self._bucket = bucket
        self._answers.clear()
        self._resolutions.clear()
        return tuple(PlannedSegment(s.name, self._cover(s.start, s.end)) for s in self._program.segments)

    def _cover(self, start: int, end: int) -> tuple[Step, ...]:
        """Steps for nodes [start, end)."""
        steps = []
        while start < end:
            step = self._longest(start, end)
            self._settle(step)
            steps.append(step)
            start += len(step.replaces)
        return tuple(steps)

    def _longest(self, start: int, end: int) -> Step:
        """The longest of what may run from ``start`` on; of equals that of the highest rank."""
        refused: list[Candidate] = []
        best: tuple[int, _Match, Resolution[_Asked]] | None = None
        for found in self._fused_at(start, end):
            if best and len(found.replaces) < len(best[1].replaces):
                break
            resolution = self._resolve(found)
            if resolution.winner is None:
                refused += resolution.candidates
            elif best is None or resolution.rank > best[0]:
                best = resolution.rank, found, resolution
        if best is None:
            alone = self._alone_at(start)
            return self._step(alone, self._covered(alone), refused)
        return self._step(best[1], best[2], refused)

    def _fused_at(self, start: int, end: int) -> Sequence[_Match]:
        """Every pattern that matches from ``start`` on, longest first."""
        known = self._fused.get((start, end))
        if known is None:
            nodes = self._program.nodes
            begun = self._patterns.get(nodes[start].op.name, ())
            found = [pattern.find(nodes, start, end, self._uses) for pattern in begun]
            known = [self._match(node, pattern) for pattern, node in filter(None, found)]
            known.sort(key=lambda match: -len(match.replaces))
            self._fused[start, end] = known
        return known

    def _alone_at(self, start: int) -> _Match:
        """The node itself."""
        known = self._alone.get(start)
        if known is None:
            known = self._alone[start] = self._match(self._program.nodes[start], None)
        return known

    def _covered(self, alone: _Match) -> Resolution[_Asked]:
        """Who runs a node by itself. Raises ResolveError when nobody does."""
        resolution = self._resolve(alone)
        if resolution.winner is None:
            node = alone.node
            shapes = ", ".join(f"{name} {list(self._bucket.shape(value))}" for name, value in node.operands.items())
            resolution.require(
                f"no kernel runs {node.op.name} on {self._context.arch} with {self._context.numerics} numerics ({shapes})",
                "choose another --hardware or --numerics, or install a plugin that has such a kernel",
            )
        return resolution

    def _match(self, node: Node, pattern: Pattern | None) -> _Match:
        parts = pattern.parts if pattern else {operand.name: node.op.name for operand in node.op.operands}
        replaces = tuple(call.op for call in pattern.fused.body) if pattern else (node.op.name,)
        signatures = tuple((name, self._signature(value)) for name, value in node.operands.items())
        attrs = tuple(item for item in node.attrs.items() if item[0] != PLACE)
        key: Hashable = node.op.name, signatures, attrs
        try:
            hash(key)
        except TypeError:  # an attribute that cannot be compared: this node is like no other
            key = id(node)
        return _Match(node, pattern, parts, replaces, key)

    def _signature(self, value: Value) -> int:
        """A number for what an operand's spec follows from, but for the bucket."""
        known = self._signatures.get(value.name)
        if known is None:
            layout = self._context.layouts[value.name] if value.kind == "weight" else None
            kind = (value.kind, value.shape, value.dtype, layout)
            known = self._signatures[value.name] = self._kinds.setdefault(kind, len(self._kinds))
        return known

    def _resolve(self, found: _Match) -> Resolution[_Asked]:
        settled = tuple(self._settled(name, value, found.parts) for name, value in found.node.operands.items())
        key = found.key, settled
        known = self._resolutions.get(key)
        if known is None:
            answers = [(asked.implementation.name, asked) for asked in self._ask(found.node, key)]
            known = resolve(answers, lambda asked: self._verdict(asked, found))
            # A refusal that names a weight is this node's alone.
            if all(entry.verdict is asked.verdict for entry, (_, asked) in zip(known.candidates, answers, strict=True)):
                self._resolutions[key] = known
        return known

    def _settled(self, name: str, value: Value, parts: Mapping[str, str]) -> str:
        """The packing or page layout that an operand has already; empty for one that has none yet."""
        if value.kind == "cache":
            layout = self._choices.caches.get(value.name)
            return layout.name if layout else ""
        if value.kind == "weight":
            packed = self._choices.packings.get((value.name, parts[name]))
            return packed.name if packed else ""
        return ""

    def _step(self, found: _Match, resolution: Resolution[_Asked], refused: Sequence[Candidate]) -> Step:
        asked, node = resolution.require(found.node.op.name, ""), found.node
        need = replace(asked.need, attrs=node.attrs) if PLACE in node.attrs else asked.need
        rejected = (*refused, *resolution.rejected)
        return Step(node, need, asked.implementation, asked.packings, found.parts, found.replaces, rejected)

    def _verdict(self, asked: _Asked, found: _Match) -> Verdict:
        """An implementation's verdict, given what other nodes and buckets have already settled."""
        for operand, packed in asked.packings.items():
            weight = found.node.operands[operand].name
            settled = self._choices.packings.get((weight, found.parts[operand]))
            if settled and settled.name != packed.name:
                return Verdict.no(f"reads {weight} packed as {packed.name}, and it is packed as {settled.name}")
        return asked.verdict

    def _ask(self, node: Node, key: Hashable) -> tuple[_Asked, ...]:
        """Everybody's answer to a node's need."""
        known = self._answers.get(key)
        if known is None:
            known = tuple(self._answer(node, implementation) for implementation in self._by_op.get(node.op.name, ()))
            self._answers[key] = known
        return known

    def _answer(self, node: Node, implementation: OpImplementation) -> _Asked:
        need = self._need(node, implementation)
        if any(value.kind == "cache" for value in node.operands.values()) and need.kv is None:
            refusal = f"cannot use pages of {need.attrs['page_tokens']} tokens laid out as already chosen"
            return _Asked(implementation, need, Verdict.no(refusal), {})
        verdict = implementation.supports(need)
        return _Asked(implementation, need, verdict, self._packings(implementation, node, need) if verdict.ok else {})

    def _need(self, node: Node, implementation: OpImplementation) -> OpNeed:
        """The need as this implementation would see it: with the settled cache layout, or its own first choice."""
        bucket = self._bucket
        operands = {name: self._spec(value) for name, value in node.operands.items()}
        need = OpNeed(
            node.op.name, operands, node.attrs, self._context.arch, self._context.numerics,
            bucket.tokens, bucket.sequences, bucket.rows, bucket.max_query, activation=self._context.activation,
            processors=self._context.processors,
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

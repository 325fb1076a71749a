"""Placing activations: values whose lives do not overlap may share memory."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from atlas_core.model.planner import Bucket, PlannedSegment
from atlas_core.model.program import Program

ALIGNMENT = 256


class Arena(Struct, frozen=True):
    """Byte offsets of every activation that reaches memory, the bytes in all, and the largest scratch of any step."""

    offsets: Mapping[str, int]
    nbytes: int
    scratch: int


def place(program: Program, segments: Sequence[PlannedSegment], bucket: Bucket) -> Arena:
    """First fit over lifetimes. A step's outputs never share memory with its inputs; results live to the end."""
    steps = [step for segment in segments for step in segment.steps]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for index, step in enumerate(steps):
        for name, value in step.node.operands.items():
            if value.kind == "activation":
                first.setdefault(value.name, index)
                last[value.name] = index
                spec = step.need.operands[name]
                elements = 1
                for extent in spec.shape:
                    elements *= extent
                sizes[value.name] = -(-elements * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    for value in program.results:
        last[value.name] = len(steps)
    offsets: dict[str, int] = {}
    alive: list[
        str
    ] = []  # in the order of their beginnings, so that whoever has ended before this one has for all that follow
    for name in sorted(first, key=lambda n: (first[n], -sizes[n], n)):
        alive = [other for other in alive if last[other] >= first[name]]
        busy = sorted((offsets[other], offsets[other] + sizes[other]) for other in alive)
        alive.append(name)
        offset = 0
        for start, end in busy:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, end)
        offsets[name] = offset
    total = max((offsets[name] + sizes[name] for name in offsets), default=0)
    return Arena(offsets, total, max((step.implementation.scratch_bytes(step.need) for step in steps), default=0))

"""What the nodes of a decode step take above the time that their weights need to be read once."""

import statistics
from collections.abc import Sequence

from atlas_core.model.planner import PlannedSegment, Step

BANDWIDTH = 4.8e12
"""Bytes a second: the data sheet of the H200."""


def chosen_inside(step: Step) -> list[int]:
    """Experts that each layer of a chain for one token reads: it tells nobody which."""
    attrs = step.need.attrs
    inside = "top_k" in attrs and "experts" not in step.need.operands
    return [attrs["top_k"]] * sum(name.startswith("layer.") for name in attrs) if inside else []


def report(rows: Sequence[tuple[str, int, float]], segments: Sequence[PlannedSegment], distinct: Sequence[int]) -> None:
    """Print it by implementation. ``rows``: (implementation and part, nodes, microseconds a node); ``distinct``: experts that mixtures read."""
    floors: dict[str, float] = {}
    for step in (step for segment in segments for step in segment.steps if step.need.op != "embed"):
        for operand, value in step.node.operands.items():
            if value.kind == "weight":
                shape = step.need.operands[operand].shape
                # Where the choice is a part of the node nobody counts: all tokens then differ at most.
                most = min(shape[0], step.need.attrs.get("top_k", shape[0]) * step.need.tokens)
                read = statistics.mean(distinct) if distinct else most
                share = read / shape[0] if len(shape) == 3 else 1.0
                us = step.packings[operand].nbytes * share / BANDWIDTH * 1e6
                floors[step.implementation.name] = floors.get(step.implementation.name, 0.0) + us
    print("above the floor of the bytes:")
    for name, floor in floors.items():
        spent = sum(count * us for row, count, us in rows if row.split()[0] == name)
        print(f"  {name:<60} {spent:9.1f} us, floor {floor:9.1f} us, above it {spent - floor:9.1f} us")

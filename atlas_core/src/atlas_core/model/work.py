"""What a token of a step costs to compute: products with weights, and attention, which grows with what stands before it."""

from atlas_core.model.program import Dim, Node, Program

_EXTENTS = {"T": 1, "S": 1, "S+1": 2, "R": 0, "U": 0}
"""A step of one prompt token whose logits nobody wants."""
_PER_KEY = 4
"""Operations for each query head, dimension and key: a multiplication and an addition in scores, the same in sums of values."""


def even_context(program: Program, tokens: int, tile: int) -> int | None:
    """The positions before a token behind which attention computes as much for it as all other ops do, in steps of ``tokens``.

    Counted are the operations that the ops state. An expert takes as long for a few tokens as for ``tile`` of them, since its weights
    have to be read and tiles to be filled. None where no layer attends to everything before it.
    """
    (forward,) = (segment for segment in program.segments if segment.name == "forward")
    once, keys = 0.0, 0
    for node in program.nodes[forward.start : forward.end]:
        if node.op.name != "paged_attention":
            shapes = {name: tuple(map(_extent, value.shape)) for name, value in node.operands.items()}
            once += node.op.flops(shapes, node.attrs) * _padding(node, tokens, tile)
        elif node.attrs["window"] == 0:
            keys += _PER_KEY * node.attrs["q_heads"] * node.attrs["head_dim"]
    return max(1, int(once / keys)) if keys else None


def _extent(dim: Dim) -> int:
    return dim if isinstance(dim, int) else _EXTENTS[dim]


def _padding(node: Node, tokens: int, tile: int) -> float:
    """How many times what its tokens need an op computes."""
    if node.op.name != "moe_experts":
        return 1.0
    experts, chosen = _extent(node.operands["gate"].shape[0]), _extent(node.operands["experts"].shape[1])
    return max(1.0, experts * tile / (tokens * chosen))

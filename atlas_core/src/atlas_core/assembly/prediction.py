"""How fast a decode step could be, from the bytes that it must read. A prediction, never a measurement."""

from math import prod

from msgspec import Struct

from atlas_core.assembly.plan import PlannedBucket
from atlas_core.model.planner import Step

CONTEXT = 1024
"""Tokens that every sequence has in the cache."""
SHARE = 0.88
"""Of the stated bandwidth: what good streaming kernels reach on machines where it was measured."""
BYTES_PER_GB = 1e9
_WHOLE = frozenset({"linear", "rms_norm", "bias_add"})
"""Primitives that read every byte of their weights in each step."""
_ROWS = frozenset({"embed"})
"""Primitives that read one row of their weight for each token."""


class Prediction(Struct, frozen=True):
    """``step_bytes`` are weights and cached keys and values that one step reads; activations are left out."""

    step_bytes: int
    tokens_per_second: float


def predict(bucket: PlannedBucket, bandwidth_gbps: float | None) -> Prediction | None:
    """The speed of a full decode bucket with one token a sequence, where memory alone is the limit.

    ``bandwidth_gbps`` is in 1e9 bytes a second. None without a bandwidth, for a bucket that holds prompts, and for a plan with
    an op whose traffic depends on the text (a mixture of experts, say).
    """
    if bandwidth_gbps is None or bucket.bucket.max_query > 1:
        return None
    total = 0
    for segment in bucket.segments:
        for step in segment.steps:
            nbytes = _read(step, bucket.bucket.tokens)
            if nbytes is None:
                return None
            total += nbytes
    seconds = total / (SHARE * bandwidth_gbps * BYTES_PER_GB)
    return Prediction(total, bucket.bucket.sequences / seconds)


def _read(step: Step, tokens: int) -> int | None:
    """Bytes of weights and cache that a step reads, or None when they cannot be told."""
    total = 0
    for name, value in step.node.operands.items():
        op = step.parts[name]
        if value.kind == "weight":
            nbytes = step.packings[name].nbytes
            if op in _ROWS:
                total += nbytes // step.need.operands[name].shape[0] * tokens
            elif op in _WHOLE:
                total += nbytes
            else:
                return None
        elif value.kind == "cache":
            if layers := step.replaces.count("paged_attention"):
                window = step.need.attrs["window"]
                kept = min(CONTEXT, window) if window > 0 else CONTEXT
                spec = step.need.operands[name]
                _, kinds, heads, _, dim = spec.shape
                total += layers * step.need.sequences * kept * prod((kinds, heads, dim)) * spec.dtype.itemsize
            elif "kv_append" not in step.replaces:  # which writes one token
                return None
    return total

"""Conformance trials of mixtures of experts: experts without tokens, one expert for all, ties, closed groups."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from atlas_core.ops.heads import sigmoid
from atlas_core.ops.trials import Array, Generate, Live, Rng, Shape, Trial, normal, pair

_ROWS = (
    (Live.decode(3), Live.decode(1)), (Live.decode(1), Live.decode(8)), (Live.prefill(17), Live.prefill(40)),
    (Live.prefill(130), Live.prefill(1)),
)  # fmt: skip
_LARGE_ROWS = ((Live.decode(1), Live.decode(1)), (Live.decode(64), Live.decode(64)), (Live.prefill(512),) * 2)


_GAP = 2e-5
"""No two scores that matter are closer, unless they are equal."""


def _clear(rng: Rng, tokens: int, experts: int, attrs: Mapping[str, Any], bias: Array) -> Array:
    """Logits of which no rounding can change the choice. In every third row the first and the middle one are equal."""
    rows: list[Array] = []
    while len(rows) < tokens:
        row = (rng.permutation(experts).astype(np.float32) - experts / 2) * np.float32(8 / experts)
        if len(rows) % 3 == 0:
            row[experts // 2] = row[0]
        scores = sigmoid(row) + bias
        grouped = np.sort(scores.reshape(attrs.get("groups", 1), -1), axis=-1)
        gaps = [np.diff(np.sort(scores)), np.diff(np.sort(grouped[:, -2:].sum(-1)))]
        if all(((gap == 0) | (gap > _GAP)).all() for gap in gaps):
            rows.append(row)
    return np.array(rows, np.float32).reshape(tokens, experts)


def _route(rng: Rng, large: bool, biased: bool) -> Iterator[Trial]:
    sizes = ((256, 8, 8, 4),) if large else ((8, 2, 1, 1), (8, 3, 4, 2), (60, 4, 3, 3), (256, 8, 8, 4), (512, 10, 1, 1))
    for experts, top_k, groups, top_groups in sizes:
        for normalise, scale in ((True, 1.0), (False, 2.5)):
            grouped = {"groups": groups, "top_groups": top_groups} if biased else {}
            attrs = {"top_k": top_k, "normalise": normalise, "scale": scale, **grouped}
            fixed = {"bias": rng.integers(-3, 4, experts).astype(np.float32) / np.float32(16)} if biased else {}
            bias = fixed.get("bias", np.zeros(experts, np.float32))
            for lives in _LARGE_ROWS if large else _ROWS:

                def make(
                    live: Live, experts: int = experts, attrs: Mapping[str, Any] = attrs, bias: Array = bias
                ) -> dict[str, Array]:
                    return {"logits": _clear(rng, live.tokens, experts, attrs, bias)}

                shapes: dict[str, Shape] = {"logits": ("T", experts), "experts": ("T", top_k), "weights": ("T", top_k)}
                shapes |= {name: array.shape for name, array in fixed.items()}
                label = f"experts={experts} top={top_k} groups={top_groups}/{groups} normalise={normalise}"
                yield pair(
                    f"{label} {'decode' if lives[0].max_query == 1 else 'tokens'}={lives[0].tokens}", lives, shapes, make,
                    fixed=fixed, attrs=attrs,
                )  # fmt: skip


def moe_route(rng: Rng, large: bool) -> Iterator[Trial]:
    """Few and many experts, with and without normalisation, ties."""
    return _route(rng, large, biased=False)


def moe_route_sigmoid(rng: Rng, large: bool) -> Iterator[Trial]:
    """As moe_route, with biases and groups of which some are closed."""
    return _route(rng, large, biased=True)


def _spread(rng: Rng, tokens: int, experts: int, top_k: int) -> Array:
    """Distinct experts of each token; low ones more often, so that some get nothing."""
    odds = rng.random((tokens, experts)) + np.linspace(1, 0, experts)
    return np.argsort(-odds, axis=-1)[:, :top_k].astype(np.int32)


def _crowded(rng: Rng, tokens: int, experts: int, top_k: int) -> Array:
    """The last experts for everybody."""
    return np.tile(np.arange(experts - top_k, experts, dtype=np.int32), (tokens, 1))


def moe_experts(rng: Rng, large: bool) -> Iterator[Trial]:
    """Sizes that are no multiples of a tile; all tokens at one expert, and experts without any."""
    sizes = ((32, 8, 2048, 768),) if large else ((8, 2, 64, 32), (5, 3, 96, 48), (16, 4, 64, 160), (4, 2, 256, 384))
    picks: tuple[tuple[str, Callable[[Rng, int, int, int], Array]], ...] = (("spread", _spread), ("crowded", _crowded))
    for experts, top_k, hidden, size in sizes:
        fixed = {
            "gate": normal(rng, experts, size, hidden, scale=hidden**-0.5),
            "up": normal(rng, experts, size, hidden, scale=hidden**-0.5),
            "down": normal(rng, experts, hidden, size, scale=size**-0.5),
        }
        shapes: dict[str, Shape] = {
            "x": ("T", hidden), "experts": ("T", top_k), "weights": ("T", top_k), "y": ("T", hidden),
            **{name: array.shape for name, array in fixed.items()},
        }  # fmt: skip
        for name, pick in picks[:1] if large else picks:
            for lives in _LARGE_ROWS if large else _ROWS:

                def make(
                    live: Live, pick: Callable[[Rng, int, int, int], Array] = pick, hidden: int = hidden,
                    experts: int = experts, top_k: int = top_k,
                ) -> dict[str, Array]:  # fmt: skip
                    weights = rng.random((live.tokens, top_k)).astype(np.float32)
                    return {
                        "x": normal(rng, live.tokens, hidden), "experts": pick(rng, live.tokens, experts, top_k),
                        "weights": weights / weights.sum(-1, keepdims=True),
                    }  # fmt: skip

                label = f"experts={experts} top={top_k} hidden={hidden} size={size} {name}"
                kind = "decode" if lives[0].max_query == 1 else "tokens"
                yield pair(f"{label} {kind}={lives[0].tokens}", lives, shapes, make, fixed=fixed)


GENERATORS: Mapping[str, Generate] = {
    "moe_route": moe_route, "moe_route_sigmoid": moe_route_sigmoid, "moe_experts": moe_experts,
}  # fmt: skip

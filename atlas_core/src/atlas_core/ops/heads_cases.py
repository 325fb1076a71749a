"""Conformance trials of norms of heads and of gates."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atlas_core.ops.trials import Array, Generate, Live, Rng, Shape, Trial, normal, pair

_EPS = 1e-6
Width = tuple[str, Mapping[str, int], Mapping[str, Array], Mapping[str, Any]]
"""Label, features of every activation, fixed arrays, attrs."""
_ROWS = (
    (Live.decode(3), Live.decode(1)), (Live.decode(1), Live.decode(8)), (Live.prefill(17), Live.prefill(40)),
    (Live.prefill(130), Live.prefill(1)),
)  # fmt: skip
_LARGE_ROWS = ((Live.decode(1), Live.decode(1)), (Live.decode(64), Live.decode(64)), (Live.prefill(512),) * 2)
_HEADS = ((4, 32), (3, 80), (9, 64), (2, 128), (2, 256))
_LARGE_HEADS = ((32, 128), (16, 256))


def _trials(
    rng: Rng, large: bool, widths: Sequence[Width], scales: Sequence[float] = (1.0,)
) -> Iterator[Trial]:  # fmt: skip
    """Ops over rows, in each of ``widths``."""
    for label, features, fixed, attrs in widths:
        for lives in _LARGE_ROWS if large else _ROWS:
            for scale in scales:

                def make(live: Live, features: Mapping[str, int] = features, scale: float = scale) -> dict[str, Array]:
                    inputs = {name: width for name, width in features.items() if name != "y"}
                    return {name: normal(rng, live.tokens, width, scale=scale) for name, width in inputs.items()}

                shapes: dict[str, Shape] = {name: ("T", width) for name, width in features.items()}
                shapes |= {name: array.shape for name, array in fixed.items()}
                text = f"{label} {'decode' if lives[0].max_query == 1 else 'tokens'}={lives[0].tokens} scale={scale:g}"
                yield pair(text, lives, shapes, make, fixed=fixed, attrs=attrs)


def head_rms_norm(rng: Rng, large: bool) -> Iterator[Trial]:
    """Few and many heads; small rows where eps matters."""
    widths: list[Width] = [
        (f"heads={heads} dim={dim}", dict.fromkeys(("x", "y"), heads * dim), _weight(rng, dim), {"eps": _EPS})
        for heads, dim in (_LARGE_HEADS if large else _HEADS)
    ]
    return _trials(rng, large, widths, (1.0,) if large else (1.0, 1e-3))


def gated_rms_norm(rng: Rng, large: bool) -> Iterator[Trial]:
    """The gate far into both tails too."""
    widths: list[Width] = [
        (f"heads={heads} dim={dim}", dict.fromkeys(("x", "gate", "y"), heads * dim), _weight(rng, dim), {"eps": _EPS})
        for heads, dim in (_LARGE_HEADS if large else _HEADS)
    ]
    return _trials(rng, large, widths, (1.0,) if large else (1.0, 20.0))


def l2_norm(rng: Rng, large: bool) -> Iterator[Trial]:
    """With and without features that pass through; small rows where eps matters."""
    sizes = ((32, 128, 4096),) if large else ((4, 16, 64), (4, 16, 0), (6, 128, 40), (1, 24, 3))
    widths: list[Width] = [
        (
            f"heads={heads} dim={dim} rest={rest}", dict.fromkeys(("x", "y"), heads * dim + rest), {},
            {"heads": heads, "head_dim": dim, "eps": _EPS},
        )
        for heads, dim, rest in sizes
    ]  # fmt: skip
    return _trials(rng, large, widths, (1.0,) if large else (1.0, 1e-3))


def sigmoid_mul(rng: Rng, large: bool) -> Iterator[Trial]:
    """A gate for each feature, and one for the whole row."""
    sizes = ((4096, 4096), (2048, 1)) if large else ((64, 64), (33, 33), (576, 1), (2048, 2048), (7, 1))
    widths: list[Width] = [
        (f"features={features} gate={gate}", {"x": features, "gate": gate, "y": features}, {}, {})
        for features, gate in sizes
    ]
    return _trials(rng, large, widths, (1.0,) if large else (1.0, 20.0))


def _weight(rng: Rng, dim: int) -> dict[str, Array]:
    return {"weight": 1 + normal(rng, dim, scale=0.3)}


GENERATORS: Mapping[str, Generate] = {
    "head_rms_norm": head_rms_norm, "gated_rms_norm": gated_rms_norm, "l2_norm": l2_norm, "sigmoid_mul": sigmoid_mul,
}  # fmt: skip

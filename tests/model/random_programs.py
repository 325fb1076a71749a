"""Random straight-line programs, and implementations that only have opinions."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from atlas_core.contracts.ops import KVLayout, Packed
from atlas_core.model.program import Recorder
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.verdict import Verdict

WIDTH = 4


@dataclass
class Opinion:
    """An implementation that is asked and never bound."""

    op: str
    name: str = ""
    verdict: Verdict = field(default_factory=Verdict.yes)
    packed: dict = field(default_factory=dict)
    pages: tuple = (KVLayout("plain16", DType.F32, 16),)
    scratch: int = 0
    kernels: tuple = ()

    def supports(self, need):
        return self.verdict

    def packings(self, need):
        return {name: Packed(packing, 64) for name, packing in self.packed.items()}

    def kv_layouts(self, need):
        return self.pages if need.op in ("kv_append", "paged_attention") else ()

    def scratch_bytes(self, need):
        return self.scratch


@st.composite
def random_programs(draw):
    """Programs of add and rms_norm over random earlier values, with random results; segments a and b."""
    recorder = Recorder()
    tokens = recorder.value("tokens", "activation", ("T",), DType.I32)
    recorder.node(
        PRIMITIVES["embed"],
        {
            "tokens": tokens,
            "weight": recorder.value("table", "weight", (8, WIDTH)),
            "y": recorder.fresh("embed", ("T", WIDTH), DType.F32),
        },
        {},
    )
    values = [recorder.value("embed.0", "activation", ("T", WIDTH), DType.F32)]
    count = draw(st.integers(1, 14))
    cut = draw(st.integers(0, count - 1))
    for index in range(count):
        x = draw(st.sampled_from(values[-4:]))
        if draw(st.booleans()):
            operands = {
                "x": x,
                "z": draw(st.sampled_from(values[-4:])),
                "y": recorder.fresh("add", ("T", WIDTH), DType.F32),
            }
            recorder.node(PRIMITIVES["add"], operands, {})
        else:
            weight = recorder.value(f"w{draw(st.integers(0, 1))}", "weight", (WIDTH,))
            operands = {"x": x, "weight": weight, "y": recorder.fresh("rms_norm", ("T", WIDTH), DType.F32)}
            recorder.node(PRIMITIVES["rms_norm"], operands, {"eps": 1e-5})
        values.append(operands["y"])
        if index == cut:
            recorder.end_segment("a")
    recorder.end_segment("b")
    results = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique_by=lambda v: v.name))
    return recorder.finish(tuple(results))


def program_values(program):
    """Tokens and weights for a random program."""
    rng = np.random.default_rng(0)
    values = {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in program.weights()}
    return {**values, "tokens": np.array([3, 1, 7], np.int32)}

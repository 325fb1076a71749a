"""Products of tokens with experts in FP8 and NVFP4, which are widened to bfloat16 in registers: launches as in moe.py."""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from atlas_core.contracts.backend import Launch
from atlas_core.contracts.ops import BindContext, OpImplementation, OpNeed, Packed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.kernel import Arg, Geometry, i32, ptr
from atlas_core.vocab.layout import StorageLayout
from atlas_core.vocab.verdict import Verdict
from atlas_nvidia.implementations import expert_codes
from atlas_nvidia.implementations.base import WARP, addresses, live_word, shared_limit
from atlas_nvidia.implementations.moe import FEW, SORTED, Sorted, Streamed, shared_blocks

MATRICES = ("gate", "up", "down")
LAYOUTS = {
    bits: tuple(name for name, packing in expert_codes.PACKINGS.items() if packing == of)
    for bits, of in ((4, expert_codes.E2M1), (8, expert_codes.E4M3))
}
"""Storage layouts by the bits of a code."""
_SLOT = {4: 16 * 64 + 128, 8: 16 * 128 + 128}
"""CODE_SLOT of expert_codes.cuh."""
_CHUNK, _COLUMN_BYTES = expert_codes.CHUNK, 2 * expert_codes.CHUNK


class Blocks(Struct, frozen=True):
    """Of a streaming kernel: BLOCK_WARPS and CODE_DEPTH, and of down CODE_TEAM and CODE_ROWS (kernels/nvidia/common/KERNEL.toml)."""

    warps: int
    depth: int
    team: int = 1
    rows: int = 16


def _suffix(bits: int) -> str:
    return "" if bits == 4 else "_e4m3"


class Coded:
    """What both ways have in common: how matrices are stored and packed."""

    def packings(self, need: OpNeed) -> Mapping[str, Packed]:
        """See OpImplementation."""
        specs = {name: need.operands[name] for name in MATRICES}
        return {name: expert_codes.packed(spec.layout, spec.shape) for name, spec in specs.items() if spec.layout}

    def pack(
        self, packing: str, layout: StorageLayout, shape: tuple[int, ...], data: bytes | memoryview
    ) -> bytes | np.ndarray:
        """See OpImplementation."""
        return expert_codes.pack(packing, layout, shape, data)


UNIT = 8
"""Tokens of an expert that share one reading of its weights (moe.cuh)."""
_TILES_OF_A_TEAM = 8


class CodedStreamed(Coded, Streamed):
    """Two launches for up to ``most`` tokens, which is UNIT or FEW."""

    gate_up = Blocks(16, 6)
    down: Mapping[int, Blocks] = {8: Blocks(16, 4, 2), 64: Blocks(8, 4, rows=32)}
    """By ``most``."""
    bits = 4

    def __init__(self, most: int, op: str) -> None:
        self.most = most
        super().__init__(UNIT, op, DType.BF16)
        self.name, self.layouts = f"{op}_coded_{self.bits}_{most}", LAYOUTS[self.bits]
        suffix = _suffix(self.bits)
        self.kernels = (
            (f"moe_coded_gate_up{suffix}", "moe_coded_gate_up"),
            (f"moe_coded_down{suffix}" + ("" if most == UNIT else f"_{most}"), "moe_coded_down"),
        )

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation."""
        reasons = self.refusals(need)
        return Verdict.no(*reasons) if reasons else Verdict.yes(60 if self.most == UNIT else 55)

    def refusals(self, need: OpNeed) -> list[str]:
        """See Implementation."""
        hidden, rows = need.operands["gate"].shape[2], self.down[self.most].rows
        reasons = super().refusals(need)
        return [*reasons, f"{hidden} outputs are no multiple of {rows}"] if hidden % rows else reasons

    def shared_bytes(self, need: OpNeed) -> tuple[int, int]:
        """Of gate_up, with as many buffers as ``buffers`` says, and of down."""
        return self._gate_up_bytes(need, self.buffers(need)), self._down_bytes(need)

    def buffers(self, need: OpNeed) -> int:
        """Units whose tokens are in shared memory: two where there is room."""
        return 2 if self._gate_up_bytes(need, 2) <= shared_limit(need) else 1

    def team(self, need: OpNeed) -> int:
        """Warps of gate_up that share out the columns of a tile: more where tiles are few."""
        experts, size, _ = need.operands["gate"].shape
        tiles = min(experts, self.choices(need)) * size // 8 // (need.processors or 1)
        teams = 2
        while 2 * teams <= min(self.gate_up.warps, tiles // _TILES_OF_A_TEAM):
            teams *= 2
        return self.gate_up.warps // teams

    def _units_bytes(self, need: OpNeed) -> int:
        experts, choices = need.operands["gate"].shape[0], self.choices(need)
        return -(-(experts + 1 + choices) // 4) * 16 + -(-choices * 10 // 16) * 16

    def _gate_up_bytes(self, need: OpNeed, buffers: int) -> int:
        tokens, hidden = need.operands["x"].shape
        column = -(-hidden // _CHUNK) * _COLUMN_BYTES + 64
        exchanged = 2 * 512 if self.team(need) > 1 else 0
        own = self.gate_up.warps * (self.gate_up.depth * _SLOT[self.bits] + exchanged)
        return own + buffers * min(UNIT, tokens) * column + self._units_bytes(need)

    def _down_bytes(self, need: OpNeed) -> int:
        tokens, blocks = need.operands["x"].shape[0], self.down[self.most]
        slot = blocks.rows // 16 * _SLOT[self.bits] + min(UNIT, tokens) * _COLUMN_BYTES
        return blocks.warps * (blocks.depth * slot + tokens * blocks.rows * 4) + self._units_bytes(need)

    def bind(self, need: OpNeed, context: BindContext) -> Sequence[Launch]:
        """See OpImplementation."""
        (gate_up, first), (down, second) = self.kernels
        experts, size, hidden = need.operands["gate"].shape
        tokens, top_k = need.operands["experts"].shape
        live = ptr(context.counts), live_word(need.operands["x"])
        inner = ptr(context.scratch.address)
        sizes = [i32(hidden), i32(size), i32(experts), i32(top_k), i32(tokens)]
        bytes_first, bytes_second = self.shared_bytes(need)
        tiles = hidden // self.down[self.most].rows
        cluster = shared_blocks(tiles, context.workers, min(experts, self.choices(need)))
        return (
            *self.launch_of(
                context, gate_up, first, Geometry((context.workers, 1, 1), (WARP * self.gate_up.warps, 1, 1), bytes_first),
                [
                    *live, *addresses(context, "x", "experts", "weights", "gate", "up"), inner, *sizes,
                    i32(self.buffers(need)), i32(self.team(need)),
                ],
            ),
            *self.launch_of(
                context, down, second, Geometry((cluster, tiles, 1), (WARP * self.down[self.most].warps, 1, 1), bytes_second),
                [
                    *live, inner, *addresses(context, "experts", "down"), self.of_residual(context), *addresses(context, "y"),
                    *sizes, i32(min(UNIT, tokens)), i32(int(need.operands["y"].dtype is DType.F32)),
                ],
                cluster=(cluster, 1, 1),
            ),
        )  # fmt: skip


class WideCodedStreamed(CodedStreamed):
    """The same for codes of eight bits."""

    gate_up = Blocks(16, 4)
    down: Mapping[int, Blocks] = {8: Blocks(16, 3, 2), 64: Blocks(8, 5)}
    bits = 8


class CodedSorted(Coded, Sorted):
    """Four launches for any number of tokens; tiles of weights are widened on their way into shared memory."""

    gemm_entries = ("moe_coded_gemm_gate_up", "moe_coded_gemm_down")

    def __init__(self, bits: int, edge: int, op: str) -> None:
        self.bits = bits
        super().__init__(edge, op, DType.BF16)
        self.layouts = LAYOUTS[bits]

    def supports(self, need: OpNeed) -> Verdict:
        """See OpImplementation. Tall tiles widen a weight for more tokens at once."""
        reasons = self.refusals(need)
        each = self.choices(need) / need.operands["gate"].shape[0]
        return Verdict.no(*reasons) if reasons else Verdict.yes(20 if (self.edge == 128) == (each >= 64) else 10)

    def variant(self) -> str:
        """See Sorted."""
        return f"coded_{self.bits}_sorted_{self.edge}"

    def gemm_module(self) -> str:
        """See Sorted."""
        return f"moe_coded_gemm{_suffix(self.bits)}" + ("" if self.edge == 64 else f"_{self.edge}")

    def gate_up_sizes(self, need: OpNeed) -> Sequence[Arg]:
        """See Sorted."""
        return *super().gate_up_sizes(need), i32(need.operands["gate"].shape[0])

    def down_sizes(self, need: OpNeed) -> Sequence[Arg]:
        """See Sorted."""
        return *super().down_sizes(need), i32(need.operands["gate"].shape[0])


ALL: tuple[OpImplementation, ...] = (
    *(made(most, op) for op in SORTED for made in (CodedStreamed, WideCodedStreamed) for most in (UNIT, FEW)),
    *(CodedSorted(bits, edge, op) for op in SORTED for bits in (4, 8) for edge in (64, 128)),
)

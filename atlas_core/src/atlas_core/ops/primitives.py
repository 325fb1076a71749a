"""The primitive ops of core, with their operands, constants and tolerances."""

from atlas_core.ops import references as ref
from atlas_core.ops import sampling
from atlas_core.ops.contract import Op, Operand, OpSet, Tolerance
from atlas_core.ops.heads import HEAD_OPS
from atlas_core.ops.moe import MOE_OPS
from atlas_core.ops.recurrent import RECURRENT_OPS
from atlas_core.ops.tolerances import EXACT, ROUNDED, SUMMED
from atlas_core.vocab.dtype import DType

_I32, _F32 = DType.I32, DType.F32
# Rounding to 8 bits in blocks of 32 errs by 0.6 % of a normal row; ten times that is out of reach of any trial's elements.
_EIGHT_BITS = 0.06
# Queries, keys, weights and values rounded to bfloat16 err by 0.4 % of a normal row.
_BF16 = 0.04


def _activation(name: str, role: str = "in", dtype: DType | None = None) -> Operand:
    return Operand(name, "activation", role, dtype)  # type: ignore[arg-type]


_X, _Y = _activation("x"), _activation("y", "out")
_POSITIONS = _activation("positions", dtype=_I32)
_CU_Q = Operand("cu_q", "input", dtype=_I32)
_ROW_SLOT = Operand("row_slot", "input", dtype=_I32)
_SAMPLE_ROW = Operand("sample_row", "input", dtype=_I32)
_SLOTS = Operand("slots", "state", dtype=_I32)
_PENALTY = Operand("penalty", "state", dtype=_I32)
_CACHE_ATTRS = ("layer", "kv_heads", "head_dim", "page_tokens", "slot_stride", "table_offset")

FORWARD_OPS = (
    Op(
        "step_begin",
        (
            Operand("updates", "input", dtype=_I32),
            Operand("token_ids", "input", dtype=_I32),
            _CU_Q,
            _ROW_SLOT,
            Operand("slots", "state", "inout", _I32),
            Operand("penalty", "state", "inout", _I32),
            _activation("tokens", "out", _I32),
            _activation("positions", "out", _I32),
            _activation("token_row", "out", _I32),
        ),
        ("slot_stride",),
        ref.step_begin,
        EXACT,
        summary="apply slot updates, expand rows to tokens and positions",
    ),
    Op(
        "embed",
        (_activation("tokens", dtype=_I32), Operand("weight", "weight"), _Y),
        (),
        ref.embed,
        ROUNDED,
        summary="embedding rows",
    ),
    Op(
        "rms_norm",
        (_X, Operand("weight", "weight"), _Y),
        ("eps",),
        ref.rms_norm,
        ROUNDED,
        lambda shapes, attrs: 4 * shapes["x"][0] * shapes["x"][1],
        "root mean square norm",
    ),
    Op("add", (_X, _activation("z"), _Y), (), ref.add, ROUNDED, summary="residual sum"),
    Op("bias_add", (_X, Operand("bias", "weight"), _Y), (), ref.bias_add, ROUNDED, summary="bias of a linear layer"),
    Op(
        "linear",
        (_X, Operand("weight", "weight"), _Y),
        (),
        ref.linear,
        SUMMED,
        lambda shapes, attrs: 2 * shapes["x"][0] * shapes["weight"][0] * shapes["weight"][1],
        "matrix product with a weight [out, in]",
        _EIGHT_BITS,
    ),
    Op(
        "rope",
        (_X, _POSITIONS, Operand("inv_freq", "constant", dtype=_F32), _Y),
        ("heads", "head_dim", "scale"),
        ref.rope,
        {**ROUNDED, DType.F32: Tolerance(1e-4, 1e-4)},
        summary="rotary position embedding",
    ),
    Op(
        "kv_append",
        (
            _activation("k"),
            _activation("v"),
            _POSITIONS,
            _activation("token_row", dtype=_I32),
            _ROW_SLOT,
            _SLOTS,
            Operand("cache", "cache", "inout"),
        ),
        _CACHE_ATTRS,
        ref.kv_append,
        ROUNDED,
        summary="write keys and values into pages",
    ),
    Op(
        "paged_attention",
        (_activation("q"), _CU_Q, _ROW_SLOT, _SLOTS, Operand("cache", "cache"), _Y),
        (*_CACHE_ATTRS, "q_heads", "scale", "window"),
        ref.paged_attention,
        {DType.F32: Tolerance(2e-5, 2e-5), DType.BF16: Tolerance(1.6e-2, 4e-3), DType.F16: Tolerance(2e-3, 1e-3)},
        summary="causal attention over pages, ragged queries",
        fast_of_row=_BF16,
    ),
    Op(
        "silu_mul",
        (_activation("gate"), _activation("up"), _Y),
        (),
        ref.silu_mul,
        ROUNDED,
        lambda shapes, attrs: 5 * shapes["gate"][0] * shapes["gate"][1],
        "SwiGLU gate",
    ),
    Op(
        "gelu_mul",
        (_activation("gate"), _activation("up"), _Y),
        (),
        ref.gelu_mul,
        ROUNDED,
        lambda shapes, attrs: 9 * shapes["gate"][0] * shapes["gate"][1],
        "GeGLU gate",
    ),
    Op(
        "gather_rows",
        (_X, Operand("logits_rows", "input", dtype=_I32), _Y),
        (),
        ref.gather_rows,
        EXACT,
        summary="rows whose logits are wanted",
    ),
)

SAMPLE_OPS = (
    Op(
        "process_logits",
        (
            _activation("logits", dtype=_F32),
            _SAMPLE_ROW,
            _ROW_SLOT,
            _SLOTS,
            _PENALTY,
            Operand("mask", "state", dtype=DType.U32),
            _activation("y", "out", _F32),
        ),
        ("slot_stride", "bias_start"),
        sampling.process_logits,
        {DType.F32: Tolerance(1e-6, 1e-6)},
        summary="bias, mask, penalties",
    ),
    Op(
        "sample",
        (
            _activation("logits", dtype=_F32),
            _SAMPLE_ROW,
            _ROW_SLOT,
            _CU_Q,
            _SLOTS,
            _activation("sampled", "out", _I32),
        ),
        ("slot_stride",),
        sampling.sample,
        {DType.F32: Tolerance(0, 0)},
        summary="temperature, top-k, top-p, min-p, choice",
    ),
    Op(
        "logprobs",
        (
            _activation("logits", dtype=_F32),
            _activation("sampled", dtype=_I32),
            Operand("scored", "input", dtype=_I32),
            _SAMPLE_ROW,
            _ROW_SLOT,
            _SLOTS,
            _activation("values", "out", _F32),
            _activation("ids", "out", _I32),
        ),
        ("slot_stride",),
        sampling.logprobs,
        {DType.F32: Tolerance(1e-5, 1e-4)},
        summary="log-probabilities of the sampled or given and of the best tokens",
    ),
    Op(
        "advance",
        (
            _activation("sampled", dtype=_I32),
            _SAMPLE_ROW,
            _ROW_SLOT,
            _CU_Q,
            Operand("slots", "state", "inout", _I32),
        ),
        ("slot_stride",),
        sampling.advance,
        {DType.F32: Tolerance(0, 0)},
        summary="move sequences on",
    ),
)

PRIMITIVES = OpSet((*FORWARD_OPS, *HEAD_OPS, *MOE_OPS, *RECURRENT_OPS, *SAMPLE_OPS))

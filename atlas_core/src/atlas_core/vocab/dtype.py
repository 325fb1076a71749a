"""The physical scalar types. The one closed list in core: a scalar is a fact of the machine, not an extension point."""

from enum import Enum


class DType(Enum):
    """A scalar type; the value is its short name, as written in KERNEL.toml and printed by ``atlas explain``."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"
    F64 = "f64"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"

    __hash__ = object.__hash__  # members are single; Enum's own hash is a call, and planning asks thousands of times

    @property
    def itemsize(self) -> int:
        """Bytes of one scalar."""
        return _SIZES[self]


_SIZES = {
    DType.F64: 8, DType.I64: 8, DType.U64: 8,
    DType.F32: 4, DType.I32: 4, DType.U32: 4,
    DType.F16: 2, DType.BF16: 2, DType.I16: 2, DType.U16: 2,
    DType.F8E4M3: 1, DType.F8E5M2: 1, DType.I8: 1, DType.U8: 1, DType.BOOL: 1,
}  # fmt: skip

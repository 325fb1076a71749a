"""A target: the machine, model and storage that kernels are chosen for."""

from msgspec import Struct


class Target(Struct, frozen=True):
    """``arch`` is the compiler's name of the instruction set (sm_90a, x86-64-v4, native)."""

    hardware: str
    arch: str
    model: str = "*"
    quant: str = "*"

    def __str__(self) -> str:
        return f"{self.hardware}/{self.model}/{self.quant} ({self.arch})"

"""The micro-architectures that kernels are built for: what each asks of a processor, and how it is compiled for."""

from collections.abc import Mapping

from msgspec import Struct

NATIVE = "native"


class Arch(Struct, frozen=True):
    """``features`` are instruction sets as /proc/cpuinfo spells them; ``flags`` go to g++ and clang++, ``zig`` is a -mcpu.

    Of the architectures that a processor can run, the one of the highest ``score`` is served.
    """

    machine: str
    features: frozenset[str]
    flags: tuple[str, ...]
    zig: str
    score: int


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_AMX = _V4 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}

ARCHS: Mapping[str, Arch] = {
    "x86-64-v4-amx": Arch(
        "x86_64", _AMX, ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_int8+amx_bf16", 40,
    ),
    "x86-64-v4-vnni": Arch(
        "x86_64", _V4, ("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni", 30
    ),
    "x86-64-v3-vnni": Arch("x86_64", _V3 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni"), "x86_64_v3+avxvnni", 20),
    "x86-64-v3": Arch("x86_64", _V3, ("-march=x86-64-v3",), "x86_64_v3", 10),
    "aarch64-i8mm": Arch(
        "aarch64", frozenset({"asimd", "asimddp", "i8mm"}), ("-march=armv8.2-a+dotprod+i8mm",), "generic+dotprod+i8mm", 20
    ),
    "aarch64": Arch("aarch64", frozenset({"asimd"}), ("-march=armv8-a",), "generic", 10),
}  # fmt: skip
"""Every architecture but ``native``, best first."""

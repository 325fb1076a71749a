"""ComputeTarget: how kernel sources become binaries of one exact architecture, before anything is served."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field


class Compiler(Struct, frozen=True):
    """A found compiler: the command that starts it and its own version line (part of the content key)."""

    command: tuple[str, ...]
    version: str


class CompileReport(Struct, frozen=True):
    """What the compiler says of its output; per entry where it can tell. Bytes, registers per thread."""

    registers: dict[str, int] = field(default_factory=dict)
    spills: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    log: str = ""


class ComputeTarget(Protocol):
    """One vendor's toolchain. Needs no device."""

    vendor: str
    source_extension: str
    output_extension: str
    output_is_text: bool

    def find_compiler(self) -> Compiler:
        """Raises KernelError that names every place searched and how to install a compiler."""
        ...

    def resolve_arch(self, arch: str) -> str:
        """The concrete name behind an alias (``native`` on a CPU), so that binaries of two machines never share a key."""
        ...

    def prototype(self, entry: str, params: Sequence[tuple[str, str]]) -> str:
        """The declaration, in the source language, that every file offering ``entry`` must agree with.

        ``params`` are (type, name) pairs, types as ``vocab.kernel.Param.type`` spells them (``i32``, ``ptr<const float>``).
        The build force-includes it: the compiler proves signatures.
        """
        ...

    def compile(
        self, compiler: Compiler, source: Path, output: Path, arch: str, flags: Sequence[str], includes: Sequence[Path],
        forced: Path,
    ) -> CompileReport:  # fmt: skip
        """Make ``output`` from ``source`` with ``forced`` included first. Raises KernelError with the compiler's words."""
        ...

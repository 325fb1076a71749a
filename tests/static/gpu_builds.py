"""Kernels of the NVIDIA hardware, compiled into pytest's cache, and what a disassembler says of them."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from cubin_file import Cubin
from msgspec.structs import replace

from atlas_core.contracts.compute_target import Compiler, CompileReport
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.build import Builder, Job
from atlas_core.kernels.record import CompiledModule
from atlas_core.kernels.scan import Places, scan
from atlas_core.kernels.tree import COMMON
from atlas_core.vocab.errors import KernelError
from atlas_nvidia.toolchain import NvidiaComputeTarget

ROOTS = [KernelRoot(package) for package in ("atlas_nvidia", "atlas_plugin_gb10", "atlas_plugin_hopper")]
_FUNCTION = re.compile(r"^\.text\.(?P<name>\w+):$")
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)")


class _Strict(NvidiaComputeTarget):
    """nvcc whose warnings are errors: a binary that was made with one is not kept."""

    def find_compiler(self) -> Compiler:
        compiler = super().find_compiler()
        return replace(compiler, version=f"{compiler.version}; strict")

    def compile(
        self, compiler: Compiler, source: Path, output: Path, arch: str, flags: Sequence[str], includes: Sequence[Path],
        forced: Path,
    ) -> CompileReport:  # fmt: skip
        report = super().compile(compiler, source, output, arch, flags, includes, forced)
        if report.log:
            raise KernelError(f"{source} compiles for {arch} with warnings", report.log)
        return report


class _Elsewhere(Places):
    """Sources where they are, binaries below ``root``: a test changes nothing that a server would load."""

    def __init__(self, places: Places, root: Path) -> None:
        super().__init__({})
        self._places = places
        self._root = root

    def path(self, identifier: str) -> Path:
        return self._places.path(identifier)

    def compiled(self, package: str, hardware: str, arch: str, layer: str) -> Path:
        return self._root / package / hardware / arch / layer


class GpuBuilds:
    """``tree`` holds every NVIDIA hardware; binaries lie below ``root``."""

    def __init__(self, root: Path) -> None:
        self.tree, places = scan(ROOTS)
        self.target = _Strict()
        self.places = _Elsewhere(places, root)
        self._records: dict[tuple[str, str], dict[str, CompiledModule]] = {}
        self._code: dict[str, dict[str, list[str]]] = {}
        self._root = root

    def compiler(self) -> Compiler:
        """nvcc; skips the test where there is none."""
        try:
            return self.target.find_compiler()
        except KernelError as error:
            pytest.skip(f"needs nvcc: {error.what}")

    def records(self, hardware: str, arch: str) -> dict[str, CompiledModule]:
        """What was built of each module. Raises KernelError for a warning, a spill, or an entry that is not as declared."""
        if (hardware, arch) not in self._records:
            self.compiler()
            self._seed(hardware, arch)
            builder = Builder(self.tree, self.places, {"nvidia": self.target}, workers=os.cpu_count() or 1)
            built = builder.build(Job(hardware, arch, COMMON))
            self._records[hardware, arch] = {one.module: one.record for one in built}
        return self._records[hardware, arch]

    def _seed(self, hardware: str, arch: str) -> None:
        """Offer the binaries of a machine that declares ``arch`` to one that does not: those of inherited modules are equal."""
        folder = self._folder(hardware, arch)
        for name, machine in self.tree.hardware.items():
            if arch in machine.manifest.archs and name != hardware and not folder.exists():
                self.records(name, arch)
                shutil.copytree(self._folder(name, arch), folder)

    def _folder(self, hardware: str, arch: str) -> Path:
        return self.places.compiled(self.tree.require(hardware).package, hardware, arch, COMMON)

    def path(self, hardware: str, arch: str, module: str) -> Path:
        """The binary of a module."""
        return self._folder(hardware, arch) / self.records(hardware, arch)[module].file

    def cubin(self, hardware: str, arch: str, module: str) -> Cubin:
        """The binary, read."""
        return Cubin(self.path(hardware, arch, module).read_bytes())

    def compile_alone(self, source: Path, arch: str, output: Path) -> Path:
        """One source outside the tree. Raises KernelError with the compiler's words."""
        compiler, forced = self.compiler(), output.with_suffix(".h")
        forced.write_text("")
        self.target.compile(compiler, source, output, arch, (), (), forced)
        return output

    def opcodes(self, cubin: Path) -> dict[str, list[str]]:
        """Every instruction's opcode with its modifiers, by function, in order."""
        # A disassembler takes as long as a compiler: what it says is kept by the bytes that it speaks of.
        key = hashlib.sha256(cubin.read_bytes()).hexdigest()
        if key not in self._code:
            kept = self._root / "disassembled" / f"{key}.json"
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                fresh = kept.with_suffix(f".{os.getpid()}")
                fresh.write_text(json.dumps(_disassembled(cubin)))
                fresh.replace(kept)
            self._code[key] = json.loads(kept.read_text())
        return self._code[key]


def _disassembled(cubin: Path) -> dict[str, list[str]]:
    nvidia = pytest.importorskip("nvidia", reason="needs nvcc's disassembler: pip install nvidia-cuda-nvdisasm")
    found = [path for folder in nvidia.__path__ for path in Path(folder).glob("*/bin/nvdisasm")]
    if not found:
        pytest.skip("needs nvcc's disassembler: pip install nvidia-cuda-nvdisasm")
    text = subprocess.run([found[0], "-c", cubin], check=True, capture_output=True, text=True).stdout
    functions: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if name := _FUNCTION.match(line):
            current = functions.setdefault(name["name"], [])
        elif opcode := _OPCODE.match(line):
            current.append(opcode["opcode"])
    assert functions, f"nvdisasm says nothing of {cubin}"
    return functions

"""Kernels of the NVIDIA hardware, compiled into pytest's cache, and what a disassembler says of them."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
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
_INSTRUCTION = re.compile(
    r"^\s+/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)", re.MULTILINE
)
_WIDTH = 16
"""Bytes of an instruction, of every architecture since Volta."""


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
        self._opcodes: dict[tuple[str, str], dict[str, dict[str, list[str]]]] = {}
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

    def opcodes(self, hardware: str, arch: str) -> dict[str, dict[str, list[str]]]:
        """Every instruction's opcode with its modifiers, in order, by module and function."""
        if (hardware, arch) not in self._opcodes:
            paths = {module: self.path(hardware, arch, module) for module in self.records(hardware, arch)}
            self._opcodes[hardware, arch] = self._disassemble(paths, arch)
        return self._opcodes[hardware, arch]

    def opcodes_alone(self, cubin: Path, arch: str) -> dict[str, list[str]]:
        """The same of one binary, by function."""
        return self._disassemble({"alone": cubin}, arch)["alone"]

    def _disassemble(self, cubins: Mapping[str, Path], arch: str) -> dict[str, dict[str, list[str]]]:
        """What a disassembler says is kept between runs by the bytes that it speaks of."""
        folder = self._root / "disassembled"
        folder.mkdir(exist_ok=True)
        data = {name: path.read_bytes() for name, path in cubins.items()}
        kept = {name: folder / f"{hashlib.sha256(content).hexdigest()}.json" for name, content in data.items()}
        missing = {name: Cubin(data[name]).code for name, path in kept.items() if not path.exists()}
        for name, functions in disassembled(missing, arch).items():
            fresh = kept[name].with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(functions))
            fresh.replace(kept[name])
        return {name: json.loads(path.read_text()) for name, path in kept.items()}


def disassembled(code: Mapping[str, Mapping[str, bytes]], arch: str) -> dict[str, dict[str, list[str]]]:
    """Opcodes of machine code by module and function, in one run: nvdisasm takes longer to start than to read a binary."""
    nvidia = pytest.importorskip("nvidia", reason="needs nvcc's disassembler: pip install nvidia-cuda-nvdisasm")
    found = [path for folder in nvidia.__path__ for path in Path(folder).glob("*/bin/nvdisasm")]
    if not found:
        pytest.skip("needs nvcc's disassembler: pip install nvidia-cuda-nvdisasm")
    if not code:
        return {}
    texts = [(module, name, text) for module, functions in code.items() for name, text in functions.items()]
    with tempfile.NamedTemporaryFile() as raw:
        raw.writelines(text for _, _, text in texts)
        raw.flush()
        command = [found[0], "--no-dataflow", "--binary", arch.replace("sm_", "SM"), raw.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    opcodes = {int(line["offset"], 16): line["opcode"] for line in _INSTRUCTION.finditer(said)}
    assert list(opcodes) == list(range(0, sum(len(text) for _, _, text in texts), _WIDTH))
    stream = iter(opcodes.values())
    result: dict[str, dict[str, list[str]]] = {module: {} for module in code}
    for module, name, text in texts:
        result[module][name] = list(islice(stream, len(text) // _WIDTH))
    assert all(result.values()), "a module without a function"
    return result

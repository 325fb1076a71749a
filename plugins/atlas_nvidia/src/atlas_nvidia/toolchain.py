"""ComputeTarget ``nvidia``: CUDA C++ to cubins of one exact architecture, by nvcc. No PTX is kept, so none is compiled.

An entry is ``extern "C" __global__``, and the generated header declares it so. A definition with other parameters is an
overload with C linkage, which nvcc refuses, or has C++ linkage, which the build sees in the compiler's list of entries.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from atlas_core.contracts.compute_target import Compiler, CompileReport
from atlas_core.kernels.command import run_compiler
from atlas_core.kernels.prototypes import c_parameters
from atlas_core.vocab.errors import KernelError

_FLAGS = ("-cubin", "-std=c++17", "-O3", "-Xptxas", "-v")
_ARCH = re.compile(r"sm_(?P<number>[0-9]{2,3}[af]?)")
_HEADERS = {
    "__nv_bfloat16": "cuda_bf16.h", "__nv_bfloat162": "cuda_bf16.h", "__half": "cuda_fp16.h", "__half2": "cuda_fp16.h",
    "__nv_fp8_e4m3": "cuda_fp8.h", "__nv_fp8_e5m2": "cuda_fp8.h", "map": "cuda.h",
}  # fmt: skip
_MAP = "const __grid_constant__ CUtensorMap"
"""How a kernel takes a ``map``: by value, in memory that the copy engine can read."""
_COMPILING = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (?P<count>\d+) registers")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")


class NvidiaComputeTarget:
    """Compiles for architectures named as nvcc names them: ``sm_90a``, ``sm_121a``."""

    vendor = "nvidia"
    source_extension = ".cu"
    output_extension = ".cubin"
    output_is_text = False

    def find_compiler(self) -> Compiler:
        """nvcc of $CUDA_HOME, $CUDA_PATH, PATH, /usr/local/cuda, in that order.

        Raises KernelError that names every place searched, or the variable that points to a folder without nvcc.
        """
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            folder = os.environ.get(variable)
            if folder:
                return self._describe(Path(folder) / "bin" / "nvcc", f"the variable {variable} says {folder}")
        found = shutil.which("nvcc")
        if found:
            return self._describe(Path(found), "found on PATH")
        usual = Path("/usr/local/cuda/bin/nvcc")
        if usual.exists():
            return self._describe(usual, "the usual place")
        raise KernelError(
            "nvcc was not found",
            f"Searched: the variables CUDA_HOME and CUDA_PATH, PATH, {usual}.",
            "Install the CUDA toolkit, or set CUDA_HOME. A GPU is not needed to build.",
        )

    def _describe(self, path: Path, reason: str) -> Compiler:
        text = run_compiler([str(path), "--version"], f"Asking nvcc for its version ({reason})")
        match = re.search(r"V\d+(?:\.\d+)+", text)
        if match is None:
            raise KernelError(f"{path} does not behave like nvcc", text.strip(), "Correct CUDA_HOME or PATH.")
        return Compiler((str(path),), f"nvcc {match[0]}; {' '.join(_FLAGS)}")

    def resolve_arch(self, arch: str) -> str:
        """Every name stands for itself: no GPU is asked. Raises KernelError for what is no architecture."""
        if _ARCH.fullmatch(arch) is None:
            raise KernelError(f"{arch!r} is not a CUDA architecture", cure="Write sm_90a, sm_121a and so on.")
        return arch

    def prototype(self, entry: str, params: Sequence[tuple[str, str]]) -> str:
        """``extern "C" __global__ void entry(...);`` with the headers that its parameter types need."""
        words = {word for declared, _ in params for word in re.findall(r"\w+", declared)}
        headers = sorted({_HEADERS[word] for word in words & _HEADERS.keys()} | {"stdint.h"})
        lines = [f"#include <{header}>" for header in headers]
        listed = ", ".join(f"{_MAP} {name}" if kind == "map" else c_parameters([(kind, name)]) for kind, name in params)
        return "\n".join([*lines, f'extern "C" __global__ void {entry}({listed});'])

    def compile(
        self, compiler: Compiler, source: Path, output: Path, arch: str, flags: Sequence[str], includes: Sequence[Path],
        forced: Path,
    ) -> CompileReport:  # fmt: skip
        """Make a cubin; the report is that of ptxas. Raises KernelError with nvcc's words."""
        number = self.resolve_arch(arch).removeprefix("sm_")
        command = [*compiler.command, *_FLAGS, "-gencode", f"arch=compute_{number},code=sm_{number}", *flags]
        for folder in includes:
            command += ["-I", str(folder)]
        command += ["-include", str(forced), str(source), "-o", str(output)]
        return read_report(run_compiler(command, f"Compiling {source} for {arch}"))


def read_report(text: str) -> CompileReport:
    """Registers, spills and static shared memory out of ``ptxas -v``; ``log`` is what remains (warnings).

    ``spills`` is the larger of stores and loads in bytes a thread, and also lists functions that were not inlined.
    """
    report = CompileReport()
    rest: list[str] = []
    entry = function = ""
    for line in text.splitlines():
        if match := _COMPILING.search(line):
            entry = match["name"]
        elif match := _PROPERTIES.search(line):
            function = match["name"]
        elif match := _SPILLS.search(line):
            report.spills[function] = max(int(match["stores"]), int(match["loads"]))
        elif match := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            report.registers[entry] = int(match["count"])
            report.shared[entry] = int(shared["bytes"]) if shared else 0
        elif not line.startswith("ptxas info"):
            rest.append(line)
    return replace(report, log="\n".join(rest).strip())

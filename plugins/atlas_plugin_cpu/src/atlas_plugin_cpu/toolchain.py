"""ComputeTarget ``cpu``: C++ kernels as shared objects, by g++, clang++ or the compiler inside the ``ziglang`` wheel.

A kernel is an ordinary typed function ``void entry(<parameters>, int task, int ntasks)``. The generated header declares
it and defines the one symbol that the runtime calls, ``atlas_entry_<entry>(const uint64_t* slots, int task, int
ntasks)``: each argument is one 8-byte slot, integers as int64, a float in the low four bytes, a pointer as its address.

Kernels are written in C++17 with C headers only: a binary needs libc, libm and nothing of any C++ library, so that
every compiler will do. The compiler contracts and reassociates nothing: a fused multiply-add is where the source says
``__builtin_fmaf`` (or an intrinsic), so the bits depend on the source alone.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from atlas_core.contracts.compute_target import Compiler, CompileReport
from atlas_core.kernels.command import run_compiler
from atlas_core.kernels.prototypes import c_parameters, c_type
from atlas_core.vocab.errors import KernelError
from atlas_plugin_cpu.archs import ARCHS, NATIVE

_FLAGS = (
    "-std=c++17", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-nostdinc++",
    "-Wall", "-Wextra", "-Wno-unused-parameter",
    # A kernel that does not define what the header declares must not link.
    "-Wl,-z,defs",
)  # fmt: skip
# gcc warns of its own <immintrin.h>, which reads undefined registers on purpose.
_FAMILY_FLAGS = {"gcc": ("-Wno-uninitialized", "-Wno-maybe-uninitialized"), "clang": ()}
_LIBRARIES = {
    "gcc": ("-nodefaultlibs", "-lm", "-lpthread", "-lc", "-lgcc"),
    "clang": ("-nostdlib++", "-lm", "-lpthread"),
}
_OWN_NAMES = frozenset({"slots", "task", "ntasks"})
# The oldest glibc that a distributed binary asks for; where zig compiles, it is chosen freely.
_GLIBC = "2.28"


def _machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _processor() -> str:
    """What decides the code that ``-march=native`` makes: the model and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError as error:
        cure = f"Name an architecture: {', '.join(ARCHS)}."
        raise KernelError("This system does not tell what its processor can do", str(error), cure) from error
    wanted = ("model name", "flags", "features", "cpu part", "cpu implementer")
    return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip().lower() in wanted}))


class CpuComputeTarget:
    """Compiles for ``native`` and everything in ``archs``."""

    vendor = "cpu"
    source_extension = ".cpp"
    output_extension = ".so"
    output_is_text = False

    def find_compiler(self) -> Compiler:
        """$CXX, else g++, clang++, else the ``ziglang`` wheel of this Python.

        Raises KernelError when there is none, or when $CXX names something that cannot be started.
        """
        wanted = os.environ.get("CXX")
        if wanted:
            return self._describe(tuple(shlex.split(wanted)))
        import shutil  # a start only asks what architectures mean

        for name in ("g++", "clang++"):
            found = shutil.which(name)
            if found:
                return self._describe((found,))
        if importlib.util.find_spec("ziglang") is not None:
            return self._describe((sys.executable, "-m", "ziglang", "c++"))
        raise KernelError(
            "No C++ compiler was found",
            "Searched: the variable CXX, g++ and clang++ on PATH, the Python package ziglang.",
            f"Run: {sys.executable} -m pip install ziglang",
        )

    def _describe(self, command: tuple[str, ...]) -> Compiler:
        if "ziglang" in command or Path(command[0]).name == "zig":
            # Not "zig c++ --version", which never ends where its cache cannot be written.
            zig = command[: command.index("c++")] if "c++" in command else command
            line = f"zig {run_compiler([*zig, 'version'], 'Asking zig for its version').strip()}, its clang"
        else:
            told = run_compiler([*command, "--version"], "Asking the C++ compiler for its version")
            line = told.partition("\n")[0].strip()
        flags = " ".join((*_FLAGS, *_FAMILY_FLAGS[_family(line)]))
        return Compiler(command, f"{line}; {flags}")

    def resolve_arch(self, arch: str) -> str:
        """``native`` becomes ``native-<8 hex digits>`` of the processor; known names stand; KernelError else."""
        if arch == NATIVE:
            facts = _machine() + "\n" + _processor()
            return f"{NATIVE}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
        if arch in ARCHS or re.fullmatch(r"native-[0-9a-f]{8}", arch):
            return arch
        raise KernelError(f"Unknown CPU architecture {arch!r}", cure=f"Use {NATIVE}, {', '.join(ARCHS)}.")

    def prototype(self, entry: str, params: Sequence[tuple[str, str]]) -> str:
        """The typed declaration, and the definition of ``atlas_entry_<entry>``, which unpacks slots and calls it.

        Raises KernelError when a parameter takes a name that the trampoline needs.
        """
        taken = [name for _, name in params if name in _OWN_NAMES]
        if taken:
            raise KernelError(
                f"Entry {entry} has a parameter named {taken[0]!r}, which every CPU kernel has", cure="Rename it."
            )
        listed = c_parameters(params)
        unpacked = [_unpack(declared, index) for index, (declared, _) in enumerate(params)]
        return "\n".join((
            "#include <stdint.h>",
            "#include <string.h>",
            f"void {entry}({listed}{', ' if listed else ''}int task, int ntasks);",
            f'extern "C" __attribute__((visibility("default"))) void atlas_entry_{entry}(',
            "    [[maybe_unused]] const uint64_t* slots, int task, int ntasks) {",
            f"    {entry}({', '.join([*unpacked, 'task', 'ntasks'])});",
            "}",
        ))  # fmt: skip

    def compile(
        self, compiler: Compiler, source: Path, output: Path, arch: str, flags: Sequence[str], includes: Sequence[Path],
        forced: Path,
    ) -> CompileReport:  # fmt: skip
        """Make a shared object. Raises KernelError with the compiler's words, or when ``arch`` is not its own."""
        zig, family = compiler.version.startswith("zig "), _family(compiler.version)
        command = [*compiler.command, *_FLAGS, *_FAMILY_FLAGS[family], *self._target_flags(arch, zig=zig), *flags]
        for folder in includes:
            command += ["-I", str(folder)]
        command += ["-include", str(forced), str(source), "-o", str(output), *_LIBRARIES[family]]
        return CompileReport(log=run_compiler(command, f"Compiling {source} for {arch}").strip())

    def _target_flags(self, arch: str, *, zig: bool) -> list[str]:
        if arch.startswith(f"{NATIVE}-"):
            here = self.resolve_arch(NATIVE)
            if arch != here:
                raise KernelError(
                    f"{arch} is another machine's processor, this one is {here}", cure=f"Build with --arch {NATIVE}."
                )
            return ["-march=native"]
        known = ARCHS[self.resolve_arch(arch)]
        if zig:
            return ["-target", f"{known.machine}-linux-gnu.{_GLIBC}", f"-mcpu={known.zig}"]
        if known.machine != _machine():
            raise KernelError(
                f"The compiler found makes code for {_machine()}, not for {arch}",
                cure="Build on such a machine, or with zig: CXX='python -m ziglang c++'.",
            )
        return list(known.flags)


def _family(version: str) -> str:
    return "clang" if "clang" in version.partition(";")[0] else "gcc"


def _unpack(declared: str, index: int) -> str:
    slot = f"slots[{index}]"
    if declared.startswith("ptr"):
        return f"reinterpret_cast<{c_type(declared)}>(static_cast<uintptr_t>({slot}))"
    if declared == "f32":
        low = f"const uint32_t low = static_cast<uint32_t>({slot});"
        return f"[&] {{ {low} float value; memcpy(&value, &low, 4); return value; }}()"
    return f"static_cast<{c_type(declared)}>({slot})"

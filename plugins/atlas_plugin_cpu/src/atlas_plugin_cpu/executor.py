"""The compiled executor, loaded: a pool of threads that runs frozen command lists, one foreign call a list."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from atlas_core.kernels.library import KernelLibrary
from atlas_core.vocab.errors import DeviceError, KernelError
from atlas_core.vocab.kernel import Arg, Geometry, Param
from atlas_plugin_cpu.machine import usable_processors

_MODULE = "executor"
_WHOLE = {"i32": (-(1 << 31), 1 << 31), "u32": (0, 1 << 32), "i64": (-(1 << 63), 1 << 63), "ptr": (0, 1 << 64)}
_Trampoline = Callable[[object, int, int], None]
TRAMPOLINE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
"""How every compiled entry is called: the address of its slots, task, tasks. Other Python threads run meanwhile."""


class Kernel(Struct, frozen=True):
    """A loaded entry. ``address`` is that of its trampoline ``(const uint64_t* slots, int task, int ntasks)``."""

    module: str
    entry: str
    params: tuple[Param, ...]
    address: int

    def __str__(self) -> str:
        return f"{self.module}.{self.entry}"


class Command(Struct, frozen=True):
    """One prepared launch: ``words`` as executor.cpp reads them. It is the CPU's ``Launch``."""

    words: tuple[int, ...]
    kernel: Kernel
    args: tuple[Arg, ...]

    @property
    def description(self) -> str:
        """The call as it would be written; a start prepares hundreds of launches, and describes none of them."""
        shown = (f"{param.name}={_show(arg)}" for param, arg in zip(self.kernel.params, self.args, strict=True))
        return f"{self.kernel}[{self.words[1]}]({', '.join(shown)})"


class Modules:
    """Loaded shared objects. A module is opened once; it stays mapped for the life of the process, as dlopen has it."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._open: dict[str, ctypes.CDLL] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def kernel(self, module: str, entry: str) -> Kernel:
        """Find and load an entry, once. Raises KernelError when it is absent or stale, or cannot be loaded here."""
        known = self._kernels.get((module, entry))
        if known is None:
            known = self._kernels[module, entry] = self._load(module, entry)
        return known

    def _load(self, module: str, entry: str) -> Kernel:
        found = self._library.find(module, entry)
        try:
            # CDLL lets go of the interpreter lock during a call.
            if module not in self._open:
                self._open[module] = ctypes.CDLL(str(found.path))
            symbol = getattr(self._open[module], f"atlas_entry_{entry}")
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"{found.path} cannot be used", str(error), "build it again: atlas kernels build --hw cpu"
            ) from error
        return Kernel(module, entry, found.params, ctypes.cast(symbol, ctypes.c_void_p).value or 0)


def pack(kernel: Kernel, geometry: Geometry, args: Sequence[Arg]) -> Command:
    """Check arguments against the declaration and pack one 8-byte slot each. Raises KernelError naming the misfit."""
    if len(args) != len(kernel.params):
        names = ", ".join(str(param) for param in kernel.params)
        raise KernelError(
            f"{kernel} takes {len(kernel.params)} arguments, got {len(args)}", f"it is declared with {names}"
        )
    tasks = geometry.grid[0]
    if tasks < 0 or geometry.grid[1:] != (1, 1) or geometry.block != (1, 1, 1) or geometry.shared:
        raise KernelError(
            f"{kernel} cannot be launched as {geometry}", "on a CPU only grid[0], the number of tasks, has a meaning"
        )
    slots = [_slot(kernel, param, arg) for param, arg in zip(kernel.params, args, strict=True)]
    return Command((kernel.address, tasks, len(slots), *slots), kernel, tuple(args))


def _show(arg: Arg) -> str:
    return hex(int(arg.value)) if arg.kind == "ptr" else repr(arg.value)


def _slot(kernel: Kernel, param: Param, arg: Arg) -> int:
    if arg.kind != param.kind:
        raise KernelError(f"{kernel}: parameter {param} was given {arg}", "kinds must be equal")
    if param.kind == "f32":
        return ctypes.c_uint32.from_buffer(ctypes.c_float(arg.value)).value
    if param.kind == "map":
        raise KernelError(f"{kernel}: parameter {param} describes a matrix", "a CPU has no copy engine to give it to")
    low, high = _WHOLE[param.kind]
    if not isinstance(arg.value, int) or not low <= arg.value < high:
        raise KernelError(
            f"{kernel}: parameter {param} was given {arg.value!r}", f"it holds whole numbers from {low} to {high - 1}"
        )
    return arg.value & 0xFFFFFFFFFFFFFFFF


class Pool:
    """The threads. ``threads`` includes the one that calls ``run``."""

    def __init__(self, modules: Modules, threads: int) -> None:
        self.threads = threads
        self._entry = {
            name: modules.kernel(_MODULE, name)
            for name in ("pool_create", "pool_destroy", "graph_create", "graph_run", "graph_destroy")
        }
        made = ctypes.c_uint64(0)
        self._call("pool_create", ctypes.addressof(made), threads, int(threads <= usable_processors()))
        if not made.value:
            raise DeviceError(
                f"a pool of {threads} threads could not be started",
                "the system refused threads or memory",
                "lower --threads",
            )
        self._pool = made.value

    def _call(self, name: str, *values: int) -> None:
        slots = (ctypes.c_uint64 * len(values))(*(value & 0xFFFFFFFFFFFFFFFF for value in values))
        TRAMPOLINE(self._entry[name].address)(slots, 0, 1)

    def run_once(self, command: Command) -> None:
        """Run one command now. Without other threads there is no list to make of it."""
        if self.threads > 1 and command.words[1] != 1:
            commands = self.freeze([command])
            commands.run()
            self.thaw(commands)
            return
        self.run_here(command)

    def run_here(self, command: Command) -> None:
        """Run one command on the calling thread, without the others'."""
        address, tasks, count, *slots = command.words
        packed, call = (ctypes.c_uint64 * max(count, 1))(*slots), TRAMPOLINE(address)
        for task in range(tasks or 1):
            call(packed, task, tasks or 1)

    def freeze(self, commands: Sequence[Command]) -> "CommandList":
        """A command list that can be run any number of times. Raises DeviceError when memory is refused."""
        words = np.array([word for command in commands for word in command.words], np.uint64)
        made = ctypes.c_uint64(0)
        self._call("graph_create", self._pool, ctypes.addressof(made), words.ctypes.data, words.size, len(commands))
        if not made.value:
            raise DeviceError(
                f"a list of {len(commands)} commands could not be made", "the system refused memory", "free some memory"
            )
        run = self._entry["graph_run"]
        slots = (ctypes.c_uint64 * len(run.params))(self._pool, made.value)
        return CommandList(made.value, len(commands), TRAMPOLINE(run.address), slots)

    def thaw(self, commands: "CommandList") -> None:
        """Give a list's memory back."""
        self._call("graph_destroy", self._pool, commands.handle)

    def close(self) -> None:
        """Stop the threads; safe to call twice."""
        if self._pool:
            self._call("pool_destroy", self._pool)
            self._pool = 0


class CommandList(Struct, frozen=True):
    """A frozen list: the CPU's graph."""

    handle: int
    commands: int
    _call: _Trampoline
    _slots: ctypes.Array[ctypes.c_uint64]

    def run(self) -> None:
        """Run every command; returns when all are done."""
        self._call(self._slots, 0, 1)

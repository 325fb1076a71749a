"""A start as it was: the machine, what the checkpoint is, the plan and its kernels."""

import hashlib
import logging
import threading
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from atlas_core.assembly.kept import file, installed, marks
from atlas_core.assembly.kept.library import KeptLibrary
from atlas_core.assembly.kept.plan import planned, tabled
from atlas_core.assembly.kept.tables import Tables
from atlas_core.assembly.machine import NOT_BUILT, Machine, arch_judge, brought, machine_tree, probed
from atlas_core.assembly.model import Model, Understood, open_model, reopen_model
from atlas_core.assembly.plan import StepPlan, make_plan
from atlas_core.contracts.checkpoint import Remembering
from atlas_core.kernels.library import CompiledKernel, KernelLibrary
from atlas_core.kernels.manifest import HardwareManifest
from atlas_core.plugins import Registry
from atlas_core.settings import Settings
from atlas_core.vocab.resolve import Candidate
from atlas_core.vocab.target import Target

_LOG = logging.getLogger("atlas.start")


class _Machine(Struct, array_like=True):
    name: str
    arch: str
    chain: tuple[HardwareManifest, ...]
    candidates: tuple[Candidate, ...]
    archs: tuple[Candidate, ...]


class _Kept(Struct, array_like=True):
    """``digest`` is of all that the start depends on; ``processors`` are those that ``plan`` (Tables) was made for."""

    digest: str
    machine: _Machine
    understood: Understood
    remembered: bytes | None
    processors: int | None
    plan: msgspec.Raw
    target: Target
    kernels: tuple[CompiledKernel, ...]
    kernels_digest: str


def _path(kind: type, value: Any) -> Any:
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"{value!r} is no {kind}")
    return Path(value)


class KeptStart:
    """What can be taken again of a start of these settings, part by part."""

    def __init__(self, registry: Registry, settings: Settings, kept: _Kept) -> None:
        self._registry = registry
        self._settings = settings
        self._kept = kept

    @property
    def processors(self) -> int | None:
        """Those that the plan was made for."""
        return self._kept.processors

    def machine(self) -> Machine:
        """The machine, whose kernel tree is read, and whose plugins are imported, when somebody asks for what they have."""
        kept, registry = self._kept.machine, self._registry
        return Machine(
            kept.name, kept.arch, registry.hardware[kept.name], registry.hardware.owner(kept.name).dist, kept.chain,
            cache(partial(machine_tree, registry, kept.name)), cache(partial(brought, registry, kept.chain)),
            kept.candidates, kept.archs,
        )  # fmt: skip

    def model(self) -> Model:
        """The model; its checkpoint's headers are read when somebody asks for what was not kept. Raises as ``open_model`` does."""
        model, remembered = None, self._kept.remembered
        if remembered is not None:
            path = Path(self._settings.model or "").expanduser()
            model = reopen_model(self._registry, path, self._kept.understood, remembered)
        return model or open_model(self._registry, self._settings, lambda done, total, note: None)

    def library(self, machine: Machine) -> KernelLibrary:
        """The kernels of the target."""

        def whole() -> KernelLibrary:
            return KernelLibrary(machine.tree, machine.places, self._kept.target)

        return KeptLibrary(self._kept.target, self._kept.kernels, self._kept.kernels_digest, whole)

    def plan(self, machine: Machine, model: Model) -> StepPlan:
        """The plan; made anew should somebody not be there who was there, as it would be for a plugin that goes by more than its files."""
        try:
            tables = msgspec.msgpack.decode(self._kept.plan, type=Tables)
            return planned(tables, machine, model.own.ops, model.own.of([each.name for each in machine.chain]))
        except (LookupError, ValueError, msgspec.MsgspecError):
            return make_plan(model, machine, self._settings, self.processors)


class Begun(Struct, frozen=True):
    """A start: with which plugins and settings, and when it began, in nanoseconds of the clock."""

    registry: Registry
    settings: Settings
    moment: int


def find(folder: Path, begun: Begun) -> KeptStart | None:
    """The start with the same settings that was kept in ``folder``; None where there is none, or where something has changed since.

    Probes and the machine's word on architectures are asked for again.
    """
    registry, settings = begun.registry, begun.settings
    path = Path(settings.model or "").expanduser()
    if registry.known is None or settings.model is None:
        return None
    try:
        data = file.read(_place(folder, settings))
        if data is None:
            return None
        kept = msgspec.msgpack.decode(data, type=_Kept, dec_hook=_path)
        if kept.digest != _digest(registry.known.digest, settings, marks.model(path)):
            return None
    except (msgspec.MsgspecError, OSError):
        return None
    return KeptStart(registry, settings, kept) if _same_machine(registry, settings, kept.machine) else None


class Made(Struct, frozen=True):
    """What a start found and planned, for a device with so many ``processors``."""

    machine: Machine
    model: Model
    plan: StepPlan
    processors: int | None
    library: KernelLibrary


def keep_aside(folder: Path, begun: Begun, made: Made) -> None:
    """``keep`` on a thread of its own, so that nobody waits for it; what keeps it from being written is logged."""

    def run() -> None:
        try:
            keep(folder, begun, made)
        except OSError as error:
            _LOG.warning("the start cannot be kept in %s: %s (--start-cache none keeps none)", folder, error)

    threading.Thread(target=run, name="atlas-keep").start()


def keep(folder: Path, begun: Begun, made: Made) -> bool:
    """Keep a start. Raises OSError.

    False where it may not be: something has changed since it began, or a plugin has values of its own kind in the plan.
    """
    machine, model, library, checkpoint = made.machine, made.model, made.library, made.model.checkpoint
    path = Path(begun.settings.model or "").expanduser()
    if begun.settings.model is None or not path.exists():
        return False
    known, files = installed.keep(folder, begun.registry), marks.model(path)
    if not known or not files.older(begun.moment):
        return False
    try:
        tables = msgspec.Raw(msgspec.msgpack.encode(tabled(made.plan)))
    except TypeError:
        return False
    kept = _Kept(
        _digest(known, begun.settings, files),
        _Machine(machine.name, machine.arch, machine.chain, machine.candidates, machine.archs),
        Understood(model.container, model.containers, model.format_name, model.formats, model.preset),
        checkpoint.remembered() if isinstance(checkpoint, Remembering) else None,
        made.processors, tables, library.target, library.found(), library.digest(),
    )  # fmt: skip
    file.write(_place(folder, begun.settings), msgspec.msgpack.encode(kept, enc_hook=str))
    return True


def _place(folder: Path, settings: Settings) -> Path:
    return folder / f"{hashlib.sha256(_asked(settings)).hexdigest()[:24]}.start"


def _asked(settings: Settings) -> bytes:
    """The settings, but for what clients must send."""
    return msgspec.msgpack.encode(replace(settings, api_key=()))


def _digest(known: str, settings: Settings, files: marks.Mark) -> str:
    parts = known.encode(), _asked(settings), files.digest.encode(), marks.processor().encode()
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _same_machine(registry: Registry, settings: Settings, kept: _Machine) -> bool:
    if settings.hardware is None:
        verdicts = probed(registry, [candidate.name for candidate in kept.candidates])
        if any(verdicts[candidate.name] != candidate.verdict for candidate in kept.candidates):
            return False
    judge = arch_judge(registry, [each.name for each in kept.chain])
    asked = [each for each in kept.archs if each.verdict != NOT_BUILT]
    return judge is None or all(judge(each.name) == each.verdict for each in asked)

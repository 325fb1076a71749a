"""Which hardware, which architecture, and what it can run."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from atlas_core.contracts.compute_target import ComputeTarget
from atlas_core.contracts.declarations import GpuBackendDecl
from atlas_core.contracts.ops import FusedOp, OpImplementation
from atlas_core.kernels.library import compiled_archs
from atlas_core.kernels.manifest import HardwareManifest
from atlas_core.kernels.scan import Places, scan
from atlas_core.kernels.tree import Hardware, KernelTree
from atlas_core.plugins.load import load
from atlas_core.plugins.registry import Registry, canonical
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.resolve import Candidate, Resolution, resolve
from atlas_core.vocab.verdict import Verdict

if TYPE_CHECKING:
    from atlas_core.plugins.probe import Prober


class Machine(Struct, frozen=True):
    """A hardware with everything that it inherits. ``candidates`` and ``archs`` hold everybody who was asked.

    ``tree`` and ``places`` are the kernel tree of all installed plugins, as far as it is this machine's. Nothing here needs the device.
    """

    name: str
    arch: str
    declaration: GpuBackendDecl
    dist: str
    chain: tuple[Hardware, ...]
    tree: KernelTree
    places: Places
    implementations: tuple[OpImplementation, ...]
    fused: tuple[FusedOp, ...]
    candidates: tuple[Candidate, ...]
    archs: tuple[Candidate, ...]

    @property
    def processors(self) -> int | None:
        """As many as its makers declare; a device may have another number."""
        return next((found for each in self.chain if (found := each.manifest.sm_count) is not None), None)


def kernel_tree(registry: Registry) -> tuple[KernelTree, Places]:
    """The union of every installed plugin's kernels."""
    return scan(registry.kernel_roots())


def choose_machine(
    registry: Registry, wanted: str | None, arch: str | None = None, prober: "Prober | None" = None
) -> Machine:
    """The hardware asked for, or the best one whose probe says that it is present.

    A hardware that was asked for is not probed: planning needs no device. Raises PluginError, ResolveError or KernelError.
    """
    if wanted is not None:
        name = canonical(wanted)
        tree, places = scan(registry.kernel_roots(), lambda declared: (name,))
        tree.require_roots(root.package for root in registry.hardware.require(name).kernel_roots)
        tree.require(name)
        if _abstract(tree, name):
            raise KernelError(
                f"{name} is not a machine",
                "its kernels exist to be extended by real hardware",
                "name one that extends it",
            )
        candidates: tuple[Candidate, ...] = (Candidate(name, Verdict.yes(0, "asked for")),)
    else:
        found: list[Resolution[str]] = []

        def best(declared: Mapping[str, HardwareManifest]) -> tuple[str, ...]:
            found.append(_present(registry, declared, prober))
            return (found[0].name,) if found[0].winner else ()

        tree, places = scan(registry.kernel_roots(), best)
        name = found[0].require(
            "no hardware is usable", "install a hardware plugin for this machine, for instance atlas-plugin-cpu"
        )
        candidates = found[0].candidates
    tree.refuse_findings(frozenset({tree.require(name).package}))  # before its elders are looked for
    chain = tree.chain(name)
    tree.refuse_findings(frozenset(hardware.package for hardware in chain))
    chosen, archs = _choose_arch(registry, tree, places, name, arch)
    return Machine(
        name, chosen, registry.hardware[name], registry.hardware.owner(name).dist, chain, tree, places,
        tuple(_collect(registry, chain, "implementations")), tuple(_collect(registry, chain, "fused")), candidates, archs,
    )  # fmt: skip


def compute_target(registry: Registry, vendor: str) -> ComputeTarget:
    """The toolchain of a vendor. Raises PluginError when no plugin brings it."""
    declaration = registry.compute_targets.require(vendor)
    target: ComputeTarget = load(declaration.target, registry.compute_targets.owner(vendor).dist)()
    return target


def _abstract(tree: KernelTree, name: str) -> bool:
    return name in tree.hardware and tree.hardware[name].manifest.abstract


def _present(registry: Registry, declared: Mapping[str, HardwareManifest], prober: "Prober | None") -> Resolution[str]:
    """Every real machine asked whether it is here. A plugin whose folder is broken is no reason to refuse the others."""
    from concurrent.futures import ThreadPoolExecutor

    from atlas_core.plugins.probe import Prober  # with processes, which a hardware that is named does not need

    asking = prober or Prober()
    real = [key for key in sorted(registry.hardware) if not (key in declared and declared[key].abstract)]

    def ask(name: str) -> Verdict:
        if name not in declared:
            return Verdict.no("its HARDWARE.toml is missing or wrong: see atlas kernels lint")
        return asking.probe(registry.hardware[name].probe, registry.hardware.owner(name).dist)

    with ThreadPoolExecutor(max(1, len(real))) as threads:  # each waits for a child process
        verdicts = dict(zip(real, threads.map(ask, real), strict=True))
    tie = "name one with --hardware, or have the probe of one answer with a higher rank"
    return resolve([(key, key) for key in real], lambda key: verdicts[key], tie=tie)


def _choose_arch(
    registry: Registry, tree: KernelTree, places: Places, hardware: str, wanted: str | None
) -> tuple[str, tuple[Candidate, ...]]:
    """The best architecture that has been built and that the machine runs, by its own word or else by the order declared.

    The first declared when there is none, so that a plan can be made.
    """
    manifest = tree.require(hardware).manifest
    target = compute_target(registry, manifest.vendor)
    built = set(compiled_archs(tree, places, hardware))
    names = {declared: target.resolve_arch(declared) for declared in manifest.archs if wanted in (None, declared)}
    if not names:
        raise KernelError(
            f"{hardware} has no architecture {wanted}",
            f"HARDWARE.toml declares {', '.join(manifest.archs)}",
            "name one of them",
        )

    judge = _arch_judge(registry, tree, hardware)

    def ask(arch: str) -> Verdict:
        if arch not in built:
            return Verdict.no("its kernels are not built")
        return judge(arch) if judge else Verdict.yes(-list(names.values()).index(arch))

    found = resolve([(arch, arch) for arch in dict.fromkeys(names.values())], ask)
    return found.winner or next(iter(names.values())), found.candidates


def _arch_judge(registry: Registry, tree: KernelTree, hardware: str) -> Callable[[str], Verdict] | None:
    """What the hardware, or else the nearest that it extends, declares to judge architectures with."""
    for elder in tree.chain(hardware):
        name = elder.manifest.name
        target = registry.hardware.require(name).runs_arch
        if target:
            judge: Callable[[str], Verdict] = load(target, registry.hardware.owner(name).dist)
            return judge
    return None


def _collect(registry: Registry, chain: Sequence[Hardware], what: str) -> list[Any]:
    """Implementations or fused ops along the chain, most specific first; a name that is taken hides its elders."""
    result: dict[str, Any] = {}
    for hardware in chain:
        name = hardware.manifest.name
        target = getattr(registry.hardware.require(name), what)
        for item in load(target, registry.hardware.owner(name).dist)() if target else ():
            result.setdefault(item.name, item)
    return list(result.values())

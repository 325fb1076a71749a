"""Which hardware, which architecture, and what it can run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from atlas_core.contracts.compute_target import ComputeTarget
from atlas_core.contracts.declarations import GpuBackendDecl
from atlas_core.contracts.ops import FusedOp, OpImplementation
from atlas_core.kernels.library import compiled_archs
from atlas_core.kernels.manifest import HardwareManifest
from atlas_core.kernels.scan import Places, scan
from atlas_core.kernels.tree import KernelTree
from atlas_core.plugins.load import load
from atlas_core.plugins.registry import Registry, canonical
from atlas_core.vocab.errors import KernelError
from atlas_core.vocab.resolve import Candidate, Resolution, resolve
from atlas_core.vocab.verdict import Verdict

if TYPE_CHECKING:
    from atlas_core.plugins.probe import Prober


class Brought(Struct, frozen=True):
    """What plugins bring for a machine."""

    implementations: tuple[OpImplementation, ...]
    fused: tuple[FusedOp, ...]


NOT_BUILT = Verdict.no("its kernels are not built")


class Machine(Struct, frozen=True):
    """A hardware with everything that it inherits. ``candidates`` and ``archs`` hold everybody who was asked.

    ``chain`` says what its makers declare, and those of the machines that it extends, most specific first. ``scanned`` gives the kernel
    tree of all installed plugins, as far as it is this machine's, with its places; ``brought`` what plugins of the chain bring for it. Nothing
    here needs the device.
    """

    name: str
    arch: str
    declaration: GpuBackendDecl
    dist: str
    chain: tuple[HardwareManifest, ...]
    scanned: Callable[[], tuple[KernelTree, Places]]
    brought: Callable[[], "Brought"]
    candidates: tuple[Candidate, ...]
    archs: tuple[Candidate, ...]

    @property
    def implementations(self) -> tuple[OpImplementation, ...]:
        """Whoever runs ops on it, most specific first."""
        return self.brought().implementations

    @property
    def fused(self) -> tuple[FusedOp, ...]:
        """The fused ops that it knows, most specific first."""
        return self.brought().fused

    @property
    def tree(self) -> KernelTree:
        """See above."""
        return self.scanned()[0]

    @property
    def places(self) -> Places:
        """Where the packages of the tree lie."""
        return self.scanned()[1]

    @property
    def processors(self) -> int | None:
        """As many as its makers declare; a device may have another number."""
        return next((each.sm_count for each in self.chain if each.sm_count is not None), None)


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
        tree, places = machine_tree(registry, name)
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
    manifests = tuple(hardware.manifest for hardware in chain)
    has = brought(registry, manifests)
    return Machine(
        name, chosen, registry.hardware[name], registry.hardware.owner(name).dist, manifests, lambda: (tree, places),
        lambda: has, candidates, archs,
    )  # fmt: skip


def brought(registry: Registry, chain: Sequence[HardwareManifest]) -> Brought:
    """What the plugins of a machine, and of those that it extends, bring for it. Raises PluginError."""
    return Brought(tuple(_collect(registry, chain, "implementations")), tuple(_collect(registry, chain, "fused")))


def machine_tree(registry: Registry, name: str) -> tuple[KernelTree, Places]:
    """The kernel tree of all installed plugins, as far as it is that of the machine ``name``, and its places."""
    return scan(registry.kernel_roots(), lambda declared: (name,))


def compute_target(registry: Registry, vendor: str) -> ComputeTarget:
    """The toolchain of a vendor. Raises PluginError when no plugin brings it."""
    declaration = registry.compute_targets.require(vendor)
    target: ComputeTarget = load(declaration.target, registry.compute_targets.owner(vendor).dist)()
    return target


def _abstract(tree: KernelTree, name: str) -> bool:
    return name in tree.hardware and tree.hardware[name].manifest.abstract


def _present(registry: Registry, declared: Mapping[str, HardwareManifest], prober: "Prober | None") -> Resolution[str]:
    """Every real machine asked whether it is here. A plugin whose folder is broken is no reason to refuse the others."""
    real = [key for key in sorted(registry.hardware) if not (key in declared and declared[key].abstract)]
    lost = Verdict.no("its HARDWARE.toml is missing or wrong: see atlas kernels lint")
    verdicts = dict.fromkeys(real, lost) | probed(registry, [name for name in real if name in declared], prober)
    tie = "name one with --hardware, or have the probe of one answer with a higher rank"
    return resolve([(key, key) for key in real], lambda key: verdicts[key], tie=tie)


def probed(registry: Registry, names: Sequence[str], prober: "Prober | None" = None) -> dict[str, Verdict]:
    """What each of these machines says to whether it is here. Probes run side by side, in processes of their own."""
    from concurrent.futures import ThreadPoolExecutor

    from atlas_core.plugins.probe import Prober  # with processes, which a hardware that is named does not need

    asking = prober or Prober()

    def ask(name: str) -> Verdict:
        return asking.probe(registry.hardware[name].probe, registry.hardware.owner(name).dist)

    with ThreadPoolExecutor(max(1, len(names))) as threads:  # each waits for a child process
        return dict(zip(names, threads.map(ask, names), strict=True))


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

    judge = arch_judge(registry, [elder.manifest.name for elder in tree.chain(hardware)])

    def ask(arch: str) -> Verdict:
        if arch not in built:
            return NOT_BUILT
        return judge(arch) if judge else Verdict.yes(-list(names.values()).index(arch))

    found = resolve([(arch, arch) for arch in dict.fromkeys(names.values())], ask)
    return found.winner or next(iter(names.values())), found.candidates


def arch_judge(registry: Registry, chain: Iterable[str]) -> Callable[[str], Verdict] | None:
    """What the first machine of ``chain``, or else the nearest that it extends, declares to judge architectures with."""
    for name in chain:
        target = registry.hardware.require(name).runs_arch
        if target:
            judge: Callable[[str], Verdict] = load(target, registry.hardware.owner(name).dist)
            return judge
    return None


def _collect(registry: Registry, chain: Sequence[HardwareManifest], what: str) -> list[Any]:
    """Implementations or fused ops along the chain, most specific first; a name that is taken hides its elders."""
    result: dict[str, Any] = {}
    for hardware in chain:
        name = hardware.name
        target = getattr(registry.hardware.require(name), what)
        for item in load(target, registry.hardware.owner(name).dist)() if target else ():
            result.setdefault(item.name, item)
    return list(result.values())

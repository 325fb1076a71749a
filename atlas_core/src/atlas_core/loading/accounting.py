"""WeightStore: a model's canonical weights, bound to the tensors of one checkpoint and accounted for without remainder."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from atlas_core.contracts.checkpoint import Checkpoint, Extent, Located
from atlas_core.contracts.model import NameMap, WeightSource
from atlas_core.loading.drawn import Drawing, Stretch
from atlas_core.loading.pieces import Placed
from atlas_core.loading.stacks import FoundStack, computed_values, find_stack, listed
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import CheckpointError
from atlas_core.vocab.layout import StorageLayout, plain
from atlas_core.vocab.model import TensorInfo

_RUN_BYTES = 128 * 1024  # shorter runs of rows cost more as reads of their own than as one read and a gather
_COMPARE_BYTES = 8 * 1024 * 1024


class WeightStore:
    """The weights of one model. ``warnings`` are sentences for the operator, complete after construction."""

    def __init__(self, checkpoint: Checkpoint, names: NameMap) -> None:
        """Bind every weight to a tensor.

        A weight with ``tied_to`` shares that weight's tensor when its own is absent or holds the same bytes; a different
        one that is stored is used, with a warning. Raises CheckpointError when a weight that is not optional is
        missing, or when a tensor is neither used nor ignored.
        """
        self._checkpoint = checkpoint
        self._located = checkpoint if isinstance(checkpoint, Located) else None
        self._drawing = checkpoint if isinstance(checkpoint, Drawing) else None
        self._sources = names.weights
        self.warnings: list[str] = []
        self._stored: dict[str, str] = {}
        self._shared: dict[str, str] = {}
        self._stacks: dict[str, FoundStack] = {}
        missing: list[str] = []
        for canonical, source in names.weights.items():
            found = next((name for name in source.names if name in checkpoint.tensors), None)
            stack = find_stack(source.stack, checkpoint.tensors) if found is None and source.stack else None
            if found is not None:
                self._stored[canonical] = found
            elif stack is not None:
                self._stored[canonical] = stack.names[0]
                self._stacks[canonical] = stack
            elif source.tied_to is None and not source.optional:
                missing.append(f"{canonical} (looked for {_looked_for(source)})")
        if missing:
            raise CheckpointError(
                f"{checkpoint.path} lacks {len(missing)} weights of the model",
                listed(missing),
                "use a complete checkpoint of this architecture",
            )
        used = {*self._stored.values(), *(name for stack in self._stacks.values() for name in stack.names)}
        for canonical, source in names.weights.items():
            if source.tied_to is not None:
                self._tie(canonical, source.tied_to)
        self._unused = sorted(
            name
            for name in checkpoint.tensors
            if name not in used and not any(fnmatchcase(name, pattern) for pattern in names.ignored)
        )
        if self._unused:
            raise CheckpointError(
                f"{checkpoint.path} has {len(self._unused)} tensors that the model does not use",
                listed(self._unused),
                "the checkpoint is of another architecture, or its model plugin is too old for it",
            )

    def has(self, canonical: str) -> bool:
        """Whether a weight is there, stored or shared; false only for optional ones."""
        return self.alias(canonical) in self._stored

    def alias(self, canonical: str) -> str:
        """The weight whose tensor this one uses: itself, unless it is tied. Raises CheckpointError for an unknown weight."""
        if canonical not in self._sources:
            raise CheckpointError(
                f"the model asks for the weight {canonical}, which its name map does not have",
                "the model plugin contradicts itself",
                "report it to the plugin's authors",
            )
        return self._shared.get(canonical, canonical)

    def info(self, canonical: str, shape: tuple[int, ...]) -> TensorInfo:
        """The tensor behind a weight of ``shape``: ``name`` is the file's, so that tied weights show the same one.

        Shape and bytes are those after ``row_order``, ``stack`` and ``offset``; inner dimensions of one element, and an outer
        one that the file leaves out, do not count in the comparison. Raises CheckpointError with expected and found shape, or when the weight is optional and absent.
        """
        owner = self.alias(canonical)
        if owner not in self._stored:
            raise CheckpointError(
                f"{self._checkpoint.path} has no weight {canonical}",
                f"looked for {_looked_for(self._sources[canonical])}",
                "use a complete checkpoint of this architecture",
            )
        if owner in self._stacks:
            return self._stacks[owner].info(self._checkpoint, shape)
        info = self._checkpoint.tensors[self._stored[owner]]
        order = self._sources[owner].row_order
        if order is not None:
            rows = info.shape[0] if info.shape else 0
            if not order or min(order) < 0 or max(order) >= rows or info.nbytes % rows:
                raise self._wrong_shape(canonical, info, (max(order, default=0) + 1, *shape[1:]))
            info = TensorInfo(info.name, (len(order), *info.shape[1:]), info.layout, info.nbytes // rows * len(order))
        found = _without_inner_units(info.shape)
        if found != tuple(shape) and (1, *found) != tuple(shape):
            raise self._wrong_shape(canonical, info, shape)
        layout = self.layout(canonical)
        return TensorInfo(info.name, tuple(shape), layout.name, layout.nbytes(shape))

    def layout(self, canonical: str) -> StorageLayout:
        """The storage layout of a weight that is there."""
        owner = self.alias(canonical)
        if self._sources[owner].computed:
            return plain(DType.F32)
        stored = self._stored[owner]
        return self._checkpoint.layout(self._checkpoint.tensors[stored].layout)

    def read(self, canonical: str) -> bytes | memoryview:
        """The bytes of a weight, its rows in the model's order. Raises CheckpointError when the file cannot be read."""
        owner = self.alias(canonical)
        source, stored = self._sources[owner], self._stored[owner]
        data = self._stacks[owner].read(self._checkpoint) if owner in self._stacks else self._rows(owner, stored)
        if not source.computed:
            return data
        return computed_values(data, self._checkpoint.tensors[stored], self._checkpoint, source)

    def placed(self, canonical: str) -> Placed | None:
        """Where ``read`` finds the bytes of a weight; None when they are changed, or the checkpoint does not tell."""
        owner = self.alias(canonical)
        source = self._sources[owner]
        if source.computed or self._located is None:
            return None
        stack, order = self._stacks.get(owner), source.row_order
        if stack is not None:
            names = stack.whole(self._checkpoint)
            return None if names is None else Placed(tuple(self._located.extent(name) for name in names))
        extent, rows = (
            self._located.extent(self._stored[owner]),
            self._checkpoint.tensors[self._stored[owner]].shape[:1],
        )
        if order is None:
            return Placed((extent,))
        if order and tuple(order) == tuple(range(order[0], order[0] + len(order))):
            width = extent.nbytes // rows[0]
            return Placed((Extent(extent.path, extent.start + order[0] * width, len(order) * width),))
        return Placed((extent,), order)

    def drawn(self, canonical: str) -> Sequence[Stretch] | None:
        """What ``read`` puts one behind another when the checkpoint makes it up; None when it does not, or the weight is changed."""
        owner = self.alias(canonical)
        source, drawing = self._sources[owner], self._drawing
        if source.computed or drawing is None:
            return None
        stack = self._stacks.get(owner)
        names = (self._stored[owner],) if stack is None else stack.whole(self._checkpoint)
        runs = None if source.row_order is None else _runs(source.row_order)
        found: list[Stretch] = []
        for name in names or ():
            part = drawing.stretches(name, runs)
            if part is None:
                return None
            found += part
        return found or None

    def _rows(self, owner: str, stored: str) -> bytes | memoryview:
        order = self._sources[owner].row_order
        if order is None:
            return self._checkpoint.read(stored)
        info = self._checkpoint.tensors[stored]
        width = info.nbytes // info.shape[0]
        runs = _runs(order)
        if width * len(order) >= _RUN_BYTES * len(runs):
            return self._checkpoint.read(stored, runs)
        rows = np.frombuffer(self._checkpoint.read(stored), np.uint8).reshape(info.shape[0], width)
        return memoryview(rows[np.asarray(order)].reshape(-1))

    def unused(self) -> Sequence[str]:
        """Tensors that are neither used nor ignored: none, since construction refuses them."""
        return self._unused

    def _tie(self, canonical: str, to: str) -> None:
        if to not in self._stored:
            raise CheckpointError(
                f"{canonical} is tied to {to}, which the checkpoint does not have", "", "use a complete checkpoint"
            )
        stored = self._stored.get(canonical)
        if stored is None:
            self._shared[canonical] = to
        elif self._same(stored, self._stored[to]):
            self._shared[canonical] = to
            del self._stored[canonical]
        else:
            self.warnings.append(
                f"{stored} is stored and differs from {self._stored[to]}, although the configuration ties them: "
                f"the stored {stored} is used"
            )

    def _same(self, one: str, other: str) -> bool:
        a, b = self._checkpoint.tensors[one], self._checkpoint.tensors[other]
        if (a.shape, a.layout, a.nbytes) != (b.shape, b.layout, b.nbytes):
            return False
        rows = a.shape[0] if a.shape else 1
        step = max(1, _COMPARE_BYTES * rows // max(a.nbytes, 1))
        return all(
            self._checkpoint.read(one, [(start, min(start + step, rows))])
            == self._checkpoint.read(other, [(start, min(start + step, rows))])
            for start in range(0, rows, step)
        )

    def _wrong_shape(self, canonical: str, info: TensorInfo, expected: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"{info.name} in {self._checkpoint.path} has the wrong shape for {canonical}",
            f"expected {list(expected)}, found {list(info.shape)}",
            "config.json and the weights belong to different models",
        )


def sources_by_tensor(weights: Mapping[str, WeightSource]) -> dict[str, list[str]]:
    """Stored name → the canonical weights that would be read from it, taking the first name of each.

    Weights that are only known as stacks are taken as one tensor for each expert.
    """
    users: dict[str, list[str]] = {}
    for canonical, source in weights.items():
        names = source.names[:1] or (source.stack.separate[0] if source.stack else ())
        for name in names:
            users.setdefault(name, []).append(canonical)
    return users


def _looked_for(source: WeightSource) -> str:
    stack = source.stack
    return listed(
        (*source.names, *(stack.fused if stack else ()), *(names[0] for names in (stack.separate if stack else ())))
    )


def _without_inner_units(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A convolution's [channels, 1, width] is the matrix [channels, width]: the same numbers in the same order."""
    return (*shape[:1], *(extent for extent in shape[1:-1] if extent != 1), *shape[1:][-1:])


def _runs(order: Sequence[int]) -> list[tuple[int, int]]:
    """``order`` as ranges [start, end) of consecutive rows."""
    runs: list[tuple[int, int]] = []
    for row in order:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs

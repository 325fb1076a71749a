"""Ops that a model family brings itself, and who runs them."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from atlas_core.contracts.declarations import ModelDecl
from atlas_core.contracts.ops import OpImplementation
from atlas_core.ops.contract import Op
from atlas_core.ops.primitives import PRIMITIVES
from atlas_core.plugins.load import load
from atlas_core.vocab.errors import PluginError


class OwnOps(Struct, frozen=True):
    """What a family brings besides core's primitives: ``ops``, all of both; and who runs its own, by hardware."""

    ops: Mapping[str, Op]
    implementations: Callable[[str], Sequence[OpImplementation]]

    def of(self, chain: Sequence[str]) -> tuple[OpImplementation, ...]:
        """Implementations for a machine and those that it extends, most specific first; a name that is taken hides its elders."""
        found: dict[str, OpImplementation] = {}
        for hardware in chain:
            for implementation in self.implementations(hardware):
                found.setdefault(implementation.name, implementation)
        return tuple(found.values())


NO_OWN_OPS = OwnOps(PRIMITIVES, lambda hardware: ())


def own_ops(declaration: ModelDecl, dist: str) -> OwnOps:
    """What the family declares. Raises PluginError when an op is not named after its distribution."""
    if not declaration.ops:
        return NO_OWN_OPS
    prefix = f"{dist}:"
    ops: dict[str, Op] = {op.name: op for op in load(declaration.ops, dist)()}
    wrong = sorted(name for name in ops if not name.startswith(prefix))
    if wrong:
        raise PluginError(
            f"{dist} declares the op {wrong[0]}", f"names of a plugin's ops begin with {prefix}", "rename it"
        )
    run = load(declaration.implementations, dist) if declaration.implementations else NO_OWN_OPS.implementations
    return OwnOps({**PRIMITIVES, **ops}, run)

"""What this distribution offers: the dialect ``toy``."""

from atlas_core.contracts.declarations import DialectDecl
from atlas_core.hookspecs import hookimpl


class Toy:
    """Turns as ``[role] text``, calls as ``!name arguments``."""

    @hookimpl
    def atlas_dialect(self) -> DialectDecl:
        """The class is imported when a model is served."""
        return DialectDecl(name="toy", dialect="atlas_dialect_toy.dialect:ToyDialect")


toy = Toy()

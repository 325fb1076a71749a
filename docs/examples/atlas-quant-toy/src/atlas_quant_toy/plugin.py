"""What this distribution offers: how ``toy_q8`` stores weights, and the ``.toyq8`` files that they come in."""

from atlas_core.contracts.declarations import QuantFormatDecl
from atlas_core.hookspecs import hookimpl


class Toy:
    """The format ``toy``, weights and container."""

    @hookimpl
    def atlas_quant_format(self) -> QuantFormatDecl:
        """Both are imported when a checkpoint is opened."""
        return QuantFormatDecl(
            name="toy", weights="atlas_quant_toy.weights:ToyFormat", container="atlas_quant_toy.container:ToyReader"
        )


toy = Toy()

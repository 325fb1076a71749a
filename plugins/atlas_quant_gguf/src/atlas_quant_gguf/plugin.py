"""What this distribution offers to Atlas."""

from atlas_core.contracts.declarations import QuantFormatDecl
from atlas_core.hookspecs import hookimpl


class _Gguf:
    """The GGUF container and its block formats."""

    @hookimpl
    def atlas_quant_format(self) -> QuantFormatDecl:
        return QuantFormatDecl(
            name="gguf",
            weights="atlas_quant_gguf.formats:GgufFormat",
            container="atlas_quant_gguf.reader:GgufReader",
        )


gguf = _Gguf()

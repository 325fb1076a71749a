"""Core's own plugins. They come through the same doors as everybody's: entry points, hooks, declarations."""

from atlas_core.contracts.declarations import DialectDecl, QuantFormatDecl
from atlas_core.hookspecs import hookimpl


class _Plain:
    """Plain arrays in Hugging Face directories."""

    @hookimpl
    def atlas_quant_format(self) -> QuantFormatDecl:
        return QuantFormatDecl(
            name="plain",
            weights="atlas_core.loading.plain:PlainFormat",
            container="atlas_core.loading.huggingface:HuggingFaceReader",
        )


class _PlainDialect:
    """The checkpoint's own chat template."""

    @hookimpl
    def atlas_dialect(self) -> DialectDecl:
        return DialectDecl(name="plain", dialect="atlas_core.text.dialects:PlainDialect")


plain = _Plain()
plain_dialect = _PlainDialect()

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


class _Scaled:
    """Small numbers with scales: FP8 and NVFP4 in Hugging Face directories."""

    @hookimpl
    def atlas_quant_format(self) -> QuantFormatDecl:
        return QuantFormatDecl(name="scaled", weights="atlas_core.loading.scaled_format:ScaledFormat")


class _Dialect:
    """One of core's dialects, a class of ``text.dialect.dialects``."""

    def __init__(self, name: str, attribute: str) -> None:
        self._declaration = DialectDecl(name=name, dialect=f"atlas_core.text.dialect.dialects:{attribute}")

    @hookimpl
    def atlas_dialect(self) -> DialectDecl:
        return self._declaration


plain = _Plain()
scaled = _Scaled()
plain_dialect = _Dialect("plain", "Plain")
hermes = _Dialect("hermes", "Hermes")
qwen3_coder = _Dialect("qwen3_coder", "Qwen3Coder")
qwen3_xml = _Dialect("qwen3_xml", "Qwen3Xml")
mistral = _Dialect("mistral", "Mistral")
minimax_xml = _Dialect("minimax_xml", "MiniMaxXml")
llama3_json = _Dialect("llama3_json", "Llama3Json")
pythonic = _Dialect("pythonic", "Pythonic")
gemma = _Dialect("gemma", "Gemma")
glm4 = _Dialect("glm4", "Glm4")
deepseek = _Dialect("deepseek", "DeepSeek")
deepseek_v32 = _Dialect("deepseek_v32", "DeepSeekTags")
bare_json = _Dialect("bare_json", "BareJson")
think = _Dialect("think", "Think")
mistral_think = _Dialect("mistral_think", "MistralThink")
seed_think = _Dialect("seed_think", "SeedThink")

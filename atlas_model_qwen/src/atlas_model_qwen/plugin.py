"""What this distribution offers: one plugin for each model_type."""

from dataclasses import dataclass

from atlas_core.contracts.declarations import ModelDecl
from atlas_core.hookspecs import hookimpl


@dataclass(frozen=True, slots=True)
class Qwen:
    """A model_type, the loader that reads it, and other names under which its checkpoints go."""

    model_type: str
    loader: str
    aliases: tuple[str, ...] = ()

    @hookimpl
    def atlas_model_weight_loader(self) -> ModelDecl:
        """The family under this name."""
        return ModelDecl(self.model_type, f"atlas_model_qwen.loader:{self.loader}", self.aliases)


qwen2 = Qwen("qwen2", "Qwen2Loader")
qwen3 = Qwen("qwen3", "Qwen3Loader")

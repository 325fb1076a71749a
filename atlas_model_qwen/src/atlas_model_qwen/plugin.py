"""What this distribution offers: one plugin for each model_type."""

from msgspec import Struct

from atlas_core.contracts.declarations import ModelDecl
from atlas_core.hookspecs import hookimpl


class Qwen(Struct, frozen=True):
    """A model_type, and other names under which its checkpoints go."""

    model_type: str
    aliases: tuple[str, ...] = ()

    @hookimpl
    def atlas_model_weight_loader(self) -> ModelDecl:
        """The family under this name."""
        return ModelDecl(
            self.model_type, f"atlas_model_qwen.loader:{self.model_type}", self.aliases, presets="atlas_model_qwen"
        )


qwen2 = Qwen("qwen2")
qwen3 = Qwen("qwen3")
qwen3_moe = Qwen("qwen3_moe")
qwen3_next = Qwen("qwen3_next")
qwen3_5 = Qwen("qwen3_5", ("qwen3_5_text",))
qwen3_5_moe = Qwen("qwen3_5_moe", ("qwen3_5_moe_text", "qwen3_6_moe"))
qwen3_vl = Qwen("qwen3_vl", ("qwen3_vl_text",))
qwen3_vl_moe = Qwen("qwen3_vl_moe", ("qwen3_vl_moe_text",))

"""What this distribution offers."""

from atlas_core.contracts.declarations import ModelDecl
from atlas_core.hookspecs import hookimpl


class MiniMaxM2:
    """model_type ``minimax_m2``: MiniMax-M2, M2.1, M2.5 and M2.7."""

    @hookimpl
    def atlas_model_weight_loader(self) -> ModelDecl:
        """The family, the dialects of its chat template, and what its model cards advise."""
        return ModelDecl(
            "minimax_m2",
            "atlas_model_minimax.loader:MiniMaxLoader",
            tool_call_parser="minimax_xml",
            reasoning_parser="think",
            presets="atlas_model_minimax",
        )


minimax_m2 = MiniMaxM2()

"""What this distribution offers."""

from atlas_core.contracts.declarations import ModelDecl
from atlas_core.hookspecs import hookimpl


class Gemma3:
    """model_type ``gemma3``: Gemma 3 from 270M to 27B; of those that see pictures, the text model."""

    @hookimpl
    def atlas_model_weight_loader(self) -> ModelDecl:
        """The family, and what its model cards advise."""
        return ModelDecl(
            "gemma3", "atlas_model_gemma.loader:Gemma3Loader", ("gemma3_text",), presets="atlas_model_gemma"
        )


gemma3 = Gemma3()

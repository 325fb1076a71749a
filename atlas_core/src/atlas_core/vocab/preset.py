"""What the makers of one model advise, as a model plugin's MODEL.toml says it."""

from msgspec import Struct


class ModelPreset(Struct, frozen=True):
    """``model_types`` (canonical), ``hidden_size`` (0: any) and ``names`` (lower case; empty: any) say which checkpoints it is for.

    ``sampling`` has (field of a request, value) pairs that hold where neither a request nor the operator says anything.
    ``tool_call_parser`` and ``reasoning_parser`` name dialects; empty, the family's declaration or the chat template decides.
    ``origin`` is the file that says all this.
    """

    name: str
    origin: str
    model_types: tuple[str, ...]
    hidden_size: int = 0
    names: tuple[str, ...] = ()
    sampling: tuple[tuple[str, float | int], ...] = ()
    tool_call_parser: str = ""
    reasoning_parser: str = ""

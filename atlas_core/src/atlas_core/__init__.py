"""Atlas: an LLM inference server assembled from plugins. This distribution knows how to serve.

``from atlas_core import LLM`` is the Python API; it is imported when it is asked for, so that importing this costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas_core.llm import LLM

__version__ = "2026.12.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return import_module("atlas_core.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "LLM"})

"""The Python API: a model in this process, for scripts and offline batches."""

from atlas_core.llm.api import LLM
from atlas_core.llm.results import Result, Usage

__all__ = ["LLM", "Result", "Usage"]

"""Atlas: an LLM inference server assembled from plugins. This distribution knows how to serve."""

__version__ = "2026.12.0"

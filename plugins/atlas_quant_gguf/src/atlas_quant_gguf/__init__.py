"""GGUF: the container, its tokenizers, and the block formats of its tensors."""

__version__ = "2026.12.0"

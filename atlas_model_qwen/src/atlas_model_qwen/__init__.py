"""The Qwen family: dense decoders, mixtures of experts, and hybrids of linear and full attention."""

__version__ = "2026.12.0"

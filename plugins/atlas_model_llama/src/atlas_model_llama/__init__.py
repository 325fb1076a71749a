"""Llama, SmolLM2 and dense Mistral models for Atlas."""

__version__ = "2026.12.0"

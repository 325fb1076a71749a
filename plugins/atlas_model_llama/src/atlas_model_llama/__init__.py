"""The Llama family: dense decoders with RMSNorm, rotary positions, grouped queries and SwiGLU (Llama, SmolLM2, Mistral)."""

__version__ = "2026.12.0"

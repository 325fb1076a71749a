"""Gemma 3: dense decoders with windows of attention between full layers, and norms on both sides of every part."""

__version__ = "2026.12.0"

"""MiniMax M2: mixtures of many experts behind full attention with half-rotated heads."""

__version__ = "2026.12.0"

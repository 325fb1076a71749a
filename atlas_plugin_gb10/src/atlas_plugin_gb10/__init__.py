"""NVIDIA GB10 (DGX Spark) for Atlas."""

__version__ = "2026.12.0"

"""NVIDIA H100 and H200 for Atlas."""

__version__ = "2026.12.0"

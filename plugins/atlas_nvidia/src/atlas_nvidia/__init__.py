"""What all NVIDIA machines share in Atlas."""

__version__ = "2026.12.0"

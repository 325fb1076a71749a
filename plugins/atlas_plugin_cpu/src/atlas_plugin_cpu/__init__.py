"""The CPU as a machine for Atlas."""

__version__ = "2026.12.0"

"""What plugins implement: Protocols whose docstrings are the law, and the small declarations that hooks return."""

API_VERSION = "1.0"
"""Version of the contracts, ``major.minor``: a plugin loads when majors are equal and the host's minor is not older.

Settled as 1.0 once the CPU and the Hopper target both served through them.
"""

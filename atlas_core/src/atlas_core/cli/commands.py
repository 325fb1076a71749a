"""The subcommands, as a table: help reads it without importing any of them."""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct


class Entry(Struct, frozen=True):
    """``attribute`` of ``module`` is the click command; ``summary`` is the first sentence of its own help."""

    module: str
    attribute: str
    summary: str
    section: str


COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "serve": Entry("atlas_core.cli.serve", "command", "Serve a model over HTTP.", "Serving"),
        "chat": Entry("atlas_core.cli.chat", "command", "Chat with a model on the terminal.", "Serving"),
        "models": Entry(
            "atlas_core.cli.models",
            "command",
            "List the models that have a short name, and those on this disk.",
            "Serving",
        ),
        "doctor": Entry(
            "atlas_core.cli.doctor",
            "command",
            "Check whether this machine can serve, and say what to do.",
            "Understanding",
        ),
        "explain": Entry(
            "atlas_core.cli.explain", "command", "Show what would be chosen for a model, and why.", "Understanding"
        ),
        "plugins": Entry("atlas_core.cli.plugins", "group", "Show the installed plugins.", "Understanding"),
        "bench": Entry("atlas_core.cli.bench", "group", "Measure a running server.", "Understanding"),
        "kernels": Entry("atlas_core.cli.kernels", "group", "List, build and test kernels.", "Making"),
        "completion": Entry("atlas_core.cli.completion", "command", "Print the completion script of a shell.", "Shell"),
    }
)

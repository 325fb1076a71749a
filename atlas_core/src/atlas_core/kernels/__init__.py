"""The kernel tree: what is declared, which file wins, what is stale, and where the binaries lie."""

"""The storage format ``toy``: an example to start from."""

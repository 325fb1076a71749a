"""The hardware ``toy``: an example to start from."""

"""The dialect ``toy``: an example to start from."""

"""Core's own dialect."""


class PlainDialect:
    """Turns as the checkpoint's own template writes them, and no further stop strings."""

    name = "plain"
    chat_template: str | None = None
    stop: tuple[str, ...] = ()

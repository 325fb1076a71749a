"""Dialect: how a family of models writes turns, tool calls and reasoning as text."""

from typing import Protocol


class Dialect(Protocol):
    """``chat_template`` replaces the checkpoint's when not None; ``stop`` are strings that end a turn besides eos tokens."""

    name: str
    chat_template: str | None
    stop: tuple[str, ...]

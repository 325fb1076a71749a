"""Dialect: how a family of models writes turns, tool calls and reasoning as text."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from atlas_core.vocab.verdict import Verdict

Schema = Mapping[str, Any] | bool
"""A JSON schema."""


class Tool(Struct, frozen=True):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Text(Struct, frozen=True):
    """A piece of the answer's own text."""

    text: str


class CallBegin(Struct, frozen=True):
    """A call of ``name`` begins; calls never overlap."""

    name: str


class CallArguments(Struct, frozen=True):
    """A piece of the arguments of the call that is open. The joined pieces are JSON, unless the model's own text was not."""

    text: str


class CallEnd(Struct, frozen=True):
    """The open call is done. A call that was cut off has no end."""


ToolEvent = Text | CallBegin | CallArguments | CallEnd


class ToolParser(Protocol):
    """Reads one answer. Events depend on the text only, not on how it was cut into pieces; nothing is ever raised.

    Markup that is no call is text, as it stands. White space next to a call belongs to its layout and is dropped.
    """

    def push(self, text: str, /) -> Sequence[ToolEvent]:
        """What ``text`` adds; what may still become markup is held back."""
        ...

    def finish(self, *, cut: bool) -> Sequence[ToolEvent]:
        """The rest. ``cut``: the answer ran into a limit, so that unfinished markup is dropped and an open call stays open."""
        ...


class ToolSyntax(Protocol):
    """How calls are written.

    ``markers`` are the spellings of control tokens that the parser must see. ``call_id_length`` is how many letters and
    digits the chat template insists on in ids of calls, 0 when it does not care.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        """See above."""
        ...

    @property
    def call_id_length(self) -> int:
        """See above."""
        ...

    def parser(self, tools: Sequence[Tool], /) -> ToolParser:
        """A parser of one answer."""
        ...

    def grammar(self, tools: Sequence[Tool], /, *, parallel: bool) -> str | None:
        """A Lark grammar (llguidance's) of answers that are calls of ``tools`` and nothing else: one, or more if ``parallel``.

        None when this syntax has no grammar. Raises RequestError for schemas that cannot be enforced.
        """
        ...


class ReasoningSyntax(Struct, frozen=True):
    """Thoughts stand between ``start`` and ``end``, at the very beginning of an answer."""

    start: str
    end: str


class Dialect(Protocol):
    """``chat_template`` replaces the checkpoint's when not None; ``stop`` are strings that end a turn besides eos tokens.

    ``tools`` and ``reasoning`` may come from two different dialects, each None when this one has nothing to say about it.
    """

    @property
    def name(self) -> str:
        """What the operator calls it."""
        ...

    @property
    def chat_template(self) -> str | None:
        """See above."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """See above."""
        ...

    @property
    def tools(self) -> ToolSyntax | None:
        """See above."""
        ...

    @property
    def reasoning(self) -> ReasoningSyntax | None:
        """See above."""
        ...

    def detect(self, template: str, /) -> Verdict:
        """Whether a model with this chat template speaks the dialect."""
        ...

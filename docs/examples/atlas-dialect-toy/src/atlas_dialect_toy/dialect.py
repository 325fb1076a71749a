"""The dialect and its parser. Pure: text in, events out."""

from collections.abc import Sequence

from atlas_core.contracts.dialect import CallArguments, CallBegin, CallEnd, Text, Tool, ToolEvent
from atlas_core.vocab.verdict import Verdict

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "


class ToyParser:
    """An answer that begins with ``!`` is one call and nothing else; every other answer is text."""

    def __init__(self) -> None:
        self._name = ""
        self._state = "start"

    def push(self, text: str) -> Sequence[ToolEvent]:
        """See contracts.dialect.ToolParser."""
        if self._state == "start" and text:
            self._state, text = ("name", text[1:]) if text[0] == "!" else ("text", text)
        if self._state == "text":
            return [Text(text)] if text else []
        if self._state == "arguments":
            return [CallArguments(text)] if text else []
        head, space, tail = text.partition(" ")
        self._name += head
        if not space:
            return []
        self._state = "arguments"
        return [CallBegin(self._name), *([CallArguments(tail)] if tail else [])]

    def finish(self, *, cut: bool) -> Sequence[ToolEvent]:
        """See contracts.dialect.ToolParser: a name without arguments was no call."""
        if self._state == "arguments":
            return [] if cut else [CallEnd()]
        return [Text(f"!{self._name}")] if self._state == "name" and not cut else []


class ToySyntax:
    """See contracts.dialect.ToolSyntax. Calls cannot be forced: there is no grammar."""

    markers: tuple[str, ...] = ()
    call_id_length = 0

    def parser(self, tools: Sequence[Tool]) -> ToyParser:
        """A parser of one answer."""
        return ToyParser()

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> str | None:
        """None."""
        return None


class ToyDialect:
    """See contracts.dialect.Dialect."""

    name = "toy"
    chat_template: str | None = TEMPLATE
    stop: tuple[str, ...] = ("\n[",)
    tools = ToySyntax()
    reasoning = None

    def detect(self, template: str) -> Verdict:
        """Never: no model has this template."""
        return Verdict.no("it is chosen by name only")

"""Parsers run over answers that come in pieces."""

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_core.contracts.dialect import CallArguments, CallBegin, CallEnd, Text, Tool
from atlas_core.plugins import discover
from atlas_core.plugins.load import load

FIXTURES = json.loads((Path(__file__).parents[2] / "data" / "parser_fixtures.json").read_text())
TOOLS = tuple(Tool(name, schema) for name, schema in FIXTURES["tools"].items())


class Answer:
    """What a parser made of an answer: text, and calls as (name, arguments as written, whether they ended)."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[tuple[str, str, bool]] = []

    def add(self, events: Any) -> "Answer":
        for event in events:
            match event:
                case Text(text):
                    assert text
                    self.text += text
                case CallBegin(name):
                    self.calls.append((name, "", False))
                case CallArguments(text):
                    name, written, ended = self.calls[-1]
                    assert text
                    assert not ended
                    self.calls[-1] = (name, written + text, False)
                case CallEnd():
                    self.calls[-1] = (*self.calls[-1][:2], True)
        return self

    @property
    def parsed(self) -> list[dict[str, Any]]:
        return [{"name": name, "arguments": json.loads(arguments)} for name, arguments, _ in self.calls]


def dialects() -> dict[str, Any]:
    registry = discover()
    return {name: load(decl.dialect, registry.dialects.owner(name).dist)() for name, decl in registry.dialects.items()}


def cuts(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


class Kit:
    tools = TOOLS
    fixtures = FIXTURES
    dialects = staticmethod(dialects)
    cuts = staticmethod(cuts)
    answer = Answer

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known

    def read(self, parser: str, pieces: Any, *, cut: bool = False) -> Answer:
        reader = self.known[parser].tools.parser(TOOLS)
        answer = Answer()
        for piece in [pieces] if isinstance(pieces, str) else pieces:
            answer.add(reader.push(piece))
        return answer.add(reader.finish(cut=cut))


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit(dialects())

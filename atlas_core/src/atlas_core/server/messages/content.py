"""An answer as blocks of content. Streams and whole answers are made of the same events, so that they say the same. Pure."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from atlas_core.contracts.dialect import Text
from atlas_core.server.answer import AnswerEvent, Arguments, Call, Thought
from atlas_core.server.messages.partial import read_input

Event = dict[str, Any]
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class Blocks:
    """Events of the blocks of one answer: one block after the other, counted from 0, none of them empty."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None
        self._text = ""
        self._held = False

    def push(self, events: Iterable[AnswerEvent]) -> list[Event]:
        """What ``events`` add."""
        found: list[Event] = []
        for event in events:
            match event:
                case Thought(text):
                    found += self._piece("thinking", {"type": "thinking", "thinking": "", "signature": ""}, text)
                case Text(text):
                    found += self._piece("text", {"type": "text", "text": ""}, text)
                case Call(_, call_id, name):
                    found += self._open("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case Arguments(_, text):
                    found += self._arguments(text)
        return found

    def close(self) -> list[Event]:
        """The end of the block that is open, if one is."""
        if self._kind is None:
            return []
        found: list[Event] = []
        if self._kind == "thinking":
            found = [self._delta({"type": "signature_delta", "signature": signature(self._text)})]
        elif self._held:
            found = [self._json(msgspec.json.encode(read_input(self._text)).decode())]
        self._kind, self._text, self._held = None, "", False
        return [*found, {"type": "content_block_stop", "index": self._index}]

    def _open(self, kind: str, block: dict[str, Any]) -> list[Event]:
        found = self.close()
        self._index += 1
        self._kind = kind
        return [*found, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _piece(self, kind: str, block: dict[str, Any], text: str) -> list[Event]:
        if not text:
            return []
        found = [] if self._kind == kind else self._open(kind, block)
        self._text += text if kind == "thinking" else ""
        delta, name = _DELTAS[kind]
        return [*found, self._delta({"type": delta, name: text})]

    def _arguments(self, text: str) -> list[Event]:
        """Passed on while they are written, unless they are no object: clients insist on one."""
        if not self._text.strip():
            self._text += text
            self._held = bool(self._text.strip()) and not self._text.lstrip().startswith("{")
            return [self._json(self._text)] if self._text.strip() and not self._held else []
        if self._held:
            self._text += text
            return []
        return [self._json(text)] if text else []

    def _json(self, text: str) -> Event:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def joined(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The blocks that ``events`` tell of."""
    blocks: list[dict[str, Any]] = []
    written: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            written.append("")
        elif event["type"] == "content_block_delta":
            block, delta = blocks[-1], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    written[-1] += delta["partial_json"]
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = read_input(written[-1])
    return blocks


def signature(thought: str) -> str:
    """Clients want one for every thought, and send it back. This server takes any: it only says which thought it stood with."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()

"""Items of an answer while they are written: each gives the events that tell of it, and itself when it is done. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from atlas_core.server.responses.items import is_whole, seal
from atlas_core.server.responses.tools import INPUT
from atlas_core.server.store.port import Item

Event = dict[str, Any]
"""An event of a stream, without its number."""

Logprobs = list[dict[str, Any]]


class Growing(Protocol):
    """An item that is being written."""

    def begin(self) -> list[Event]:
        """The events of an item that is empty yet."""
        ...

    def end(self, *, cut: bool) -> tuple[list[Event], Item]:
        """(the last events, the item as it is kept); ``cut`` when the answer ran into a limit here."""
        ...


class _Told:
    """What all items have: where their events say that they belong."""

    def __init__(self, item: dict[str, Any], index: int) -> None:
        """``item`` is the item as it stands at its beginning; ``index`` its place in the output."""
        self._start = item
        self._index = index

    def begin(self) -> list[Event]:
        """See Growing."""
        return [{"type": "response.output_item.added", "output_index": self._index, "item": self._start}]

    def _about(self, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._start["id"], "output_index": self._index, **more}

    def _done(self, *, cut: bool, **more: Any) -> tuple[Event, Item]:
        item = {**self._start, "status": "incomplete" if cut else "completed", **more}
        return {"type": "response.output_item.done", "output_index": self._index, "item": item}, item


class GrowingMessage(_Told):
    """A message of one part of text."""

    def __init__(self, id: str, index: int) -> None:  # noqa: A002 the word for it
        start = {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        super().__init__(start, index)
        self._pieces: list[str] = []
        self._logprobs: Logprobs = []

    def begin(self) -> list[Event]:
        """See Growing."""
        return [*super().begin(), self._about("content_part.added", content_index=0, part=_text_part("", []))]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """The events for more text."""
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._about("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def end(self, *, cut: bool) -> tuple[list[Event], Item]:
        """See Growing."""
        text = "".join(self._pieces)
        part = _text_part(text, self._logprobs)
        done, item = self._done(cut=cut, content=[part])
        return [
            self._about("output_text.done", content_index=0, text=text, logprobs=self._logprobs),
            self._about("content_part.done", content_index=0, part=part),
            done,
        ], item


class GrowingThought(_Told):
    """A reasoning item: the thought is its content, or its summary where a summary was asked for."""

    def __init__(self, id: str, index: int, *, summary: bool, sealed: bool) -> None:  # noqa: A002
        """``sealed``: the item carries the thought as ``encrypted_content`` too, to be sent back."""
        start: dict[str, Any] = {"id": id, "type": "reasoning", "status": "in_progress", "summary": []}
        super().__init__(start if summary else {**start, "content": []}, index)
        self._pieces: list[str] = []
        self._sealed = sealed
        self._place = "summary" if summary else "content"
        self._part = "reasoning_summary_part" if summary else "content_part"
        self._text = "reasoning_summary_text" if summary else "reasoning_text"
        self._where = {f"{self._place}_index": 0}

    def begin(self) -> list[Event]:
        """See Growing."""
        return [*super().begin(), self._about(f"{self._part}.added", **self._where, part=self._written(""))]

    def add(self, text: str) -> list[Event]:
        """The events for more of the thought."""
        self._pieces.append(text)
        return [self._about(f"{self._text}.delta", **self._where, delta=text)]

    def end(self, *, cut: bool) -> tuple[list[Event], Item]:
        """See Growing."""
        text = "".join(self._pieces)
        part = self._written(text)
        sealed = {"encrypted_content": seal(text)} if self._sealed else {}
        done, item = self._done(cut=cut, **{self._place: [part]}, **sealed)
        return [
            self._about(f"{self._text}.done", **self._where, text=text),
            self._about(f"{self._part}.done", **self._where, part=part),
            done,
        ], item

    def _written(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self._place == "summary" else "reasoning_text", "text": text}


class GrowingCall(_Told):
    """A call of a function."""

    def __init__(self, id: str, index: int, call_id: str, name: str, space: str | None = None) -> None:  # noqa: A002
        """``name`` is that in the namespace ``space``."""
        start = {"type": "function_call", "call_id": call_id, "name": name, **_in_space(space), "arguments": ""}
        super().__init__({"id": id, "status": "in_progress", **start}, index)
        self._name = name
        self._pieces: list[str] = []

    def add(self, text: str) -> list[Event]:
        """The events for more of the arguments."""
        self._pieces.append(text)
        return [self._about("function_call_arguments.delta", delta=text)]

    def end(self, *, cut: bool) -> tuple[list[Event], Item]:
        """See Growing. The limit may have come after the call was whole."""
        arguments = "".join(self._pieces)
        done, item = self._done(cut=cut and not is_whole(arguments), arguments=arguments)
        told = self._about("function_call_arguments.done", name=self._name, arguments=arguments)
        return [told, done], item


class GrowingCustomCall(_Told):
    """A call of a custom tool: what the model writes as the argument ``input`` is passed on as text."""

    def __init__(self, id: str, index: int, call_id: str, name: str, space: str | None = None) -> None:  # noqa: A002
        """``name`` is that in the namespace ``space``."""
        start = {"type": "custom_tool_call", "call_id": call_id, "name": name, **_in_space(space), "input": ""}
        super().__init__({"id": id, "status": "in_progress", **start}, index)
        self._arguments: list[str] = []
        self._reader = InputReader()
        self._told = ""

    def add(self, text: str) -> list[Event]:
        """The events for more of the arguments."""
        self._arguments.append(text)
        return self._tell(self._reader.push(text))

    def end(self, *, cut: bool) -> tuple[list[Event], Item]:
        """See Growing."""
        arguments = "".join(self._arguments)
        whole = is_whole(arguments)
        said = json.loads(arguments) if whole else {}
        text = said.get(INPUT) if isinstance(said, Mapping) else None
        if not isinstance(text, str):
            # Not what was declared: what was told already stands, else all that the model wrote.
            text = self._told or arguments
        # Half of a surrogate pair may be escaped in JSON, and cannot be sent as text.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        events = self._tell(text.removeprefix(self._told)) if text.startswith(self._told) else []
        done, item = self._done(cut=cut and not whole, input=self._told)
        return [*events, self._about("custom_tool_call_input.done", input=self._told), done], item

    def _tell(self, text: str) -> list[Event]:
        self._told += text
        return [self._about("custom_tool_call_input.delta", delta=text)] if text else []


class InputReader:
    r"""Reads the string in ``{"input": "…"}`` while it is written; gives nothing for any other text.

    An escape is held back until all of it is there, half of a surrogate pair until its other half is.
    """

    _OPENING = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')
    _WHOLE = re.compile(
        r"""(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u])+"""
    )

    def __init__(self) -> None:
        self._rest = ""
        self._inside = False
        self._lost = False

    def push(self, text: str) -> str:
        """What ``text`` adds to the string."""
        if self._lost:
            return ""
        self._rest += text
        if not self._inside:
            opening = self._OPENING.match(self._rest)
            if opening is None:
                return ""
            self._inside = True
            self._rest = self._rest[opening.end() :]
        found = self._WHOLE.match(self._rest)
        if found is None:
            return ""
        self._rest = self._rest[found.end() :]
        try:
            decoded: str = json.loads(f'"{found[0]}"', strict=False)
        except ValueError:
            # An escape that JSON does not know; the end, which sees everything, decides.
            self._lost = True
            return ""
        return decoded


def _in_space(space: str | None) -> dict[str, str]:
    return {} if space is None else {"namespace": space}


def _text_part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

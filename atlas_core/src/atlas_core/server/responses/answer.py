"""The response object at every stage of its life, and the stream that tells of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from atlas_core.server.errors import answer_to, one_line
from atlas_core.server.responses.assembly import Assembly, Shape
from atlas_core.server.responses.growing import Event
from atlas_core.server.responses.schema import ResponsesRequest
from atlas_core.server.sse import PING, encode
from atlas_core.server.store.port import Item
from atlas_core.server.turn import Output, Turn
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.messages import Delta

ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""The states in which a response stays."""


class Asked(Struct, frozen=True):
    """What the response object repeats of its request; ``conversation`` is the id of the one that it belongs to."""

    request: ResponsesRequest
    stored: bool
    conversation: str | None = None

    def fixed(self, turn: Turn) -> dict[str, Any]:
        """The members that do not change while the response is made."""
        request, sampling = self.request, turn.sequences[0].sampling
        reasoning, text = request.reasoning, request.text
        return {
            "id": turn.id,
            "object": "response",
            "created_at": turn.created,
            "background": bool(request.background),
            "conversation": {"id": self.conversation} if self.conversation else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": turn.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": summary_of(request),
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self.stored,
            "temperature": sampling.temperature,
            "text": {
                "format": (text.format if text else None) or {"type": "text"},
                "verbosity": text.verbosity if text else None,
            },
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs,
            "top_p": sampling.top_p,
            "truncation": request.truncation or "disabled",
            "user": request.user,
        }


def summary_of(request: ResponsesRequest) -> str | None:
    """The kind of summary that is asked for, None when none is."""
    if request.reasoning is None:
        return None
    asked = request.reasoning.summary or request.reasoning.generate_summary
    return None if asked == "none" else asked


class ResponseWriter:
    """Events of one response, numbered from 0. The object is the same as that of an answer that is not streamed.

    ``body`` is the response object as it stands; its items are done.
    """

    ping = PING

    def __init__(
        self, turn: Turn, asked: Asked, shape: Shape, new_id: Callable[[str], str], clock: Callable[[], float]
    ) -> None:
        """``clock`` is Unix time, seconds."""
        self._assembly = Assembly(turn, shape, new_id)
        self._fixed = asked.fixed(turn)
        self._clock = clock
        self._number = 0
        self._output = Output()
        self.body = self._body("in_progress")

    @property
    def items(self) -> Sequence[Item]:
        """The items that are done."""
        return self._assembly.items

    def waiting(self) -> dict[str, Any]:
        """The object of a response that has not begun yet."""
        return self._body("queued")

    def opening(self) -> bytes:
        """The response, empty yet; in the background it waits first."""
        begun = [self._told("in_progress")]
        if not self._fixed["background"]:
            return self._lines([self._told("created"), *begun])
        waiting = self.waiting()
        return self._lines(
            [{"type": f"response.{kind}", "response": waiting} for kind in ("created", "queued")] + begun
        )

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Events for ``delta``. Behind the last one ``body`` is the whole response."""
        events = self._assembly.push(delta)
        if delta.finish is not None:
            self._output.count(delta)
            self.body = self._body("incomplete" if delta.finish == "length" else "completed")
        return self._lines(events)

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """The whole response."""
        return self._lines([self._told(self.body["status"])])

    def failed(self, error: AtlasError) -> bytes:
        """The response as a failed one."""
        self.fail(error)
        return self._lines([self._told("failed")])

    def fail(self, error: AtlasError) -> None:
        """Make ``body`` say that it came to nothing."""
        code = "server_error" if answer_to(error).status >= 500 else "invalid_prompt"
        self.body = self._body("failed", error={"code": code, "message": one_line(error)})

    def cancel(self) -> None:
        """Make ``body`` say that nobody wants it any more."""
        self.body = self._body("cancelled")

    def _body(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {
            **self._fixed,
            "status": status,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._assembly.items),
            "usage": usage(self._output) if self._output.finish is not None else None,
        }

    def _told(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self.body}

    def _lines(self, events: Sequence[Event]) -> bytes:
        lines = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._number, **event}
            lines.append(b"event: " + event["type"].encode() + b"\ndata: " + encode(numbered) + b"\n\n")
            self._number += 1
        return b"".join(lines)


def usage(output: Output) -> dict[str, Any]:
    """The usage object of a response. What is written into the prefix cache is not counted."""
    return {
        "input_tokens": output.prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": output.prompt_tokens + output.completion_tokens,
    }

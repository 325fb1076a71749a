"""``POST /v1/chat/completions``."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.contracts.dialect import Text
from atlas_core.server.answer import AnswerEvent, AnswerReader, Arguments, Call, Reading, Thought, read_message
from atlas_core.server.conversation import REASONING, ToolUse, tool_use
from atlas_core.server.logprobs import chat_logprobs, prompt_logprobs
from atlas_core.server.ports import ServedModel
from atlas_core.server.prompt import Conversation, encode_pieces, render
from atlas_core.server.schema import ChatRequest, read_request, unknown_fields
from atlas_core.server.sse import DONE, Chunks, ChunkTemplate, encode
from atlas_core.server.structured import answer_grammar, form_field
from atlas_core.server.thinking import thinking_wish
from atlas_core.server.translate import check_prompt
from atlas_core.server.turn import Output, Prompt, Turn, usage
from atlas_core.text.dialect.thought import Opening
from atlas_core.text.grammar import check, whole_grammar
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Delta, Ready, Thinking

_ROLE = b'{"role":"assistant","content":""}'
_NOTHING_ELSE = b'},"logprobs":null,"finish_reason":null}'


class Chat:
    """The chat face. ``reasoning`` are the names under which answers have thoughts."""

    id_prefix = "chatcmpl-"

    def __init__(self, reasoning: Sequence[str] = REASONING[:1]) -> None:
        self._reasoning = tuple(reasoning)

    def read(self, body: Mapping[str, Any]) -> tuple[ChatRequest, list[str]]:
        """See Face."""
        # Answers of this endpoint are not kept, and whoever asks for that should know.
        kept = ["store"] if body.get("store") else []
        return read_request(ChatRequest, body), unknown_fields(ChatRequest, body) + kept

    def count(self, request: ChatRequest) -> int:
        """One: the conversation."""
        return 1

    def reading(self, request: ChatRequest, model: ServedModel) -> Reading:
        """By the model's dialect, and the request's tools."""
        use = _tools(request, model)
        return Reading(use.tools, model.speech.tools, model.speech.reasoning, use.parallel, use.named)

    def quick(self, request: ChatRequest) -> bool:
        """No: templates are programs."""
        return False

    def prompts(self, request: ChatRequest, model: ServedModel, info: Ready) -> list[Prompt]:
        """One prompt: the messages, as the model's template writes them."""
        use = _tools(request, model)
        answers = _answers(request, model, use)
        wish = thinking_wish(request, model.thinking_budget)
        extra = dict(wish.variables)
        if request.verbosity is not None:
            extra.setdefault("verbosity", request.verbosity)
        asked = Conversation(
            request.messages, use.declared, request.add_generation_prompt, bool(request.continue_final_message), extra,
            thinking=model.thinking and wish.wanted,
        )  # fmt: skip
        pieces, opening = render(model, asked)
        # The template has printed what belongs round the text.
        ids = encode_pieces(model.tokenizer, pieces, add_special=False)
        grammar = ""
        if answers:
            grammar = whole_grammar(answers, model.speech.reasoning, opening)
            check(grammar, form_field(request) or "tool_choice")
        return [
            Prompt(check_prompt(ids, info, "messages"), "", opening, grammar, _thinking(model, opening, wish.budget))
        ]

    def whole(self, turn: Turn, outputs: Sequence[Output]) -> dict[str, Any]:
        """A ``chat.completion``."""
        body = {
            **_envelope(turn, "chat.completion"),
            "choices": [_choice(turn, index, output, self._reasoning) for index, output in enumerate(outputs)],
            "usage": usage(outputs, turn.n),
        }
        if turn.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_positions, turn.prompt_logprobs)
        return body | ({"prompt_token_ids": turn.prompts[0].ids} if turn.token_ids else {})

    def writer(self, turn: Turn) -> "ChatChunks":
        """A writer of ``chat.completion.chunk`` events."""
        return ChatChunks(turn, self._reasoning)


class ChatChunks(Chunks):
    """First a delta with the role, then deltas with what the answer gains, last an empty one with the finish reason."""

    def __init__(self, turn: Turn, reasoning: Sequence[str] = REASONING[:1]) -> None:
        self._turn = turn
        self._reasoning = reasoning
        self._template = ChunkTemplate(_envelope(turn, "chat.completion.chunk"), usage_null=turn.include_usage)
        self._opened = [False] * len(turn.sequences)
        self._heads = [f'{{"index":{index},"delta":'.encode() for index in range(len(turn.sequences))]
        self._texts = [self._template.round(head + b'{"content":', _NOTHING_ELSE) for head in self._heads]
        self._readers = [AnswerReader(turn.reading, turn.prompt_of(i).opening) for i in range(len(turn.sequences))]
        self._plain = not turn.wants_logprobs and not turn.token_ids and self._readers[0].plain

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Events for ``delta``: none while its text is held back and nothing else was asked for."""
        if self._plain and self._opened[index] and delta.finish is None:
            # Nearly every delta of nearly every stream.
            before, after = self._texts[index]
            return b"%b%b%b" % (before, encode(delta.text), after) if delta.text else b""
        events = b""
        if not self._opened[index]:
            events = self._event(index, _ROLE, more=b"" if any(self._opened) else self._prompt_ids())
            self._opened[index] = True
        reader = self._readers[index]
        gained = [*reader.push(delta.text)]
        if delta.finish is not None:
            gained += reader.finish(cut=delta.finish == "length")
        pieces = [_delta(event, self._reasoning) for event in gained]
        if not pieces and ((delta.logprobs and self._turn.wants_logprobs) or (delta.tokens and self._turn.token_ids)):
            pieces = [{"content": ""}]
        for number, piece in enumerate(pieces):
            # Tokens and their log-probabilities stand once, with the first of what they gave.
            events += self._event(index, encode(piece), delta if number == 0 else None)
        if delta.finish is not None:
            events += self._event(index, b"{}", finish=encode(reader.finish_reason(delta.finish)))
        return events

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """The usage, if it was asked for, and the DONE mark."""
        return (self._template.closing(usage(outputs, self._turn.n)) if self._turn.include_usage else b"") + DONE

    def _event(
        self, index: int, content: bytes, delta: Delta | None = None, *, finish: bytes = b"null", more: bytes = b""
    ) -> bytes:
        choice = self._heads[index] + content
        if delta is not None and self._turn.wants_logprobs:
            choice += b',"logprobs":' + encode(_logprobs(chat_logprobs(delta.logprobs, self._turn.hidden)))
        else:
            choice += b',"logprobs":null'
        choice += b',"finish_reason":' + finish
        if delta is not None and self._turn.token_ids:
            choice += b',"token_ids":' + encode(delta.tokens)
        return self._template.choice(choice + b"}", more)

    def _prompt_ids(self) -> bytes:
        return b',"prompt_token_ids":' + encode(self._turn.prompts[0].ids) if self._turn.token_ids else b""


def _tools(request: ChatRequest, model: ServedModel) -> ToolUse:
    """The request's tools. Raises RequestError when this model cannot call any."""
    use = tool_use(request)
    if use.tools and model.speech.tools is None:
        raise RequestError(
            "this model calls no tools", "its chat template shows no known way to write calls",
            "leave tools out, or start the server with --tool-call-parser", kind="unsupported", field="tools",
            code="unsupported_parameter",
        )  # fmt: skip
    return use


def _answers(request: ChatRequest, model: ServedModel, use: ToolUse) -> list[str]:
    """Grammars, one of which the answer must follow; none when it is free. Raises RequestError."""
    form = answer_grammar(request)
    if not use.tools or (form is None and not use.forced):
        return [] if form is None else [form]
    syntax = model.speech.tools
    calls = syntax.grammar(use.tools, parallel=use.parallel) if syntax else None
    if calls is None:
        field = "tool_choice" if use.forced else form_field(request) or "tools"
        raise RequestError(
            f"{field} cannot be enforced beside tools", f"there is no grammar of {model.speech.tool_dialect} calls",
            "set tool_choice to auto and leave the form free, or tool_choice to none", kind="unsupported", field=field,
            code="unsupported_parameter",
        )  # fmt: skip
    if request.min_tokens:
        raise RequestError(
            "min_tokens contradicts the rest of the request", "an answer of a given form ends when the form does", "",
            field="min_tokens", code="invalid_value",
        )  # fmt: skip
    return [calls] if use.forced else [calls, form or ""]


def _thinking(model: ServedModel, opening: Opening, budget: int | None) -> Thinking | None:
    syntax = model.speech.reasoning
    if syntax is None or opening == "closed":
        return None
    ids = model.tokenizer.encode(syntax.end, add_special=False) if budget is not None else ()
    return Thinking(syntax.start, syntax.end, opening == "open", budget, tuple(ids))


def _delta(event: AnswerEvent, reasoning: Sequence[str]) -> dict[str, Any]:
    match event:
        case Thought(text):
            return dict.fromkeys(reasoning, text)
        case Text(text):
            return {"content": text}
        case Call(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _envelope(turn: Turn, kind: str) -> dict[str, Any]:
    return {
        "id": turn.id, "object": kind, "created": turn.created, "model": turn.model, "system_fingerprint": turn.fingerprint,
    }  # fmt: skip


def _choice(turn: Turn, index: int, output: Output, reasoning: Sequence[str]) -> dict[str, Any]:
    found = read_message(turn.reading, turn.prompt_of(index).opening, output.text, output.finish)
    silent = not found.content and (found.calls or found.reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": None if silent else found.content, "refusal": None}
    if found.reasoning:
        message |= dict.fromkeys(reasoning, found.reasoning)
    if found.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in zip(found.calls, found.arguments, strict=True)
        ]
    choice = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(chat_logprobs(output.positions, turn.hidden)) if turn.wants_logprobs else None,
        "finish_reason": found.finish_reason,
    }
    return choice | ({"token_ids": output.tokens} if turn.token_ids else {})


def _logprobs(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": content, "refusal": None}

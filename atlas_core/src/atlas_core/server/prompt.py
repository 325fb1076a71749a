"""From a conversation to a prompt: the template's text, its ids, and what its end says about thoughts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from atlas_core.contracts.dialect import ReasoningSyntax
from atlas_core.server.conversation import check_messages, with_failures, with_ids, with_thoughts
from atlas_core.server.ports import ServedModel, Tokenizer
from atlas_core.server.thinking import SWITCHES
from atlas_core.text.dialect.thought import Opening, continued, opening
from atlas_core.text.guard import Guard
from atlas_core.vocab.errors import RequestError

Pieces = Sequence[tuple[str, bool]]


class Conversation(Struct, frozen=True):
    """What a prompt is made of.

    ``tools`` are declarations. ``opening`` unsaid means: open the answer, unless the last turn is gone on with. ``extra`` are further
    variables of the template. ``thinking`` false asks for an answer without a thought.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    opening: bool | None = None
    going_on: bool = False
    extra: Mapping[str, Any] | None = None
    thinking: bool = True


def render(model: ServedModel, asked: Conversation) -> tuple[Pieces, Opening]:
    """The text of a conversation, in pieces with whether control tokens in them are meant (see text.guard), and the state of its end.

    Raises RequestError for messages of a wrong shape, for a model without a template, and when the template refuses.
    """
    check_messages(asked.messages)
    template = model.tool_template if asked.tools and model.tool_template is not None else model.template
    if template is None:
        raise RequestError(
            "this model has no chat template", "its checkpoint brings none, as base models do",
            "use the completions endpoint, or start the server with --chat-template FILE",
            kind="unsupported", code="no_chat_template",
        )  # fmt: skip
    length = model.speech.tools.call_id_length if model.speech.tools else 0
    messages = with_ids(with_failures(with_thoughts(asked.messages)), length)
    extra = dict(asked.extra or {}) | (dict.fromkeys(SWITCHES, False) if not asked.thinking else {})
    guard = Guard(model.tokenizer.special_tokens, [messages, asked.tools, extra])
    text = template.render(
        guard.conceal(messages),
        tools=guard.conceal(asked.tools) or None,
        add_generation_prompt=not asked.going_on if asked.opening is None else asked.opening,
        continue_final_message=asked.going_on,
        extra=guard.conceal(extra),
    )
    pieces = list(guard.pieces(text))
    syntax = model.speech.reasoning
    if syntax is None:
        return pieces, "closed"
    state = _state(asked, text, syntax)
    if state == "open" and not asked.thinking:
        # The template knows no such switch: what it opened is closed again.
        return [*pieces, (f"\n{syntax.end}\n\n", True)], "closed"
    return pieces, state


def encode_pieces(
    tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]], *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Ids of a rendered conversation: control tokens are read where they are meant, if ``parse_special`` says so at all."""
    ids: list[int] = []
    for text, meant in pieces:
        ids += tokenizer.encode(text, add_special=add_special and not ids, parse_special=meant and parse_special)
    return ids


def _state(asked: Conversation, text: str, syntax: ReasoningSyntax) -> Opening:
    if not asked.going_on:
        return opening(text, syntax)
    content = asked.messages[-1].get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return continued("".join(part["text"] for part in parts), syntax)

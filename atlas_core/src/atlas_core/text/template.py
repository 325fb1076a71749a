"""Chat templates: Jinja in a sandbox, with the functions that templates of checkpoints call."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atlas_core.text.messages import TemplateAbilities, normalise
from atlas_core.vocab.errors import CheckpointError, RequestError

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_NEEDLE = "atlas-needle"
_END_MARK = "\ue000atlas-end\ue001"


class ChatTemplate:
    """One template of a checkpoint, ready to render."""

    def __init__(self, source: str, special: Mapping[str, str], *, strftime: Callable[[str], str]) -> None:
        """``special`` holds bos_token and its like, which templates print; ``strftime`` formats the current time.

        Raises CheckpointError when the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                "the chat template is not valid",
                f"line {error.lineno}: {error.message}",
                "correct it, or give another with --chat-template",
            ) from error
        self._special = dict(special)
        self.abilities = self._probe(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. ``extra`` are further variables (``chat_template_kwargs``); no tools and an empty list are the same.

        With ``continue_final_message`` the prompt ends right after the last message's text, exactly as given, so that the
        model goes on with it. Raises RequestError: with the template's own words when it refuses, else with what failed.
        """
        reserved = sorted(_RESERVED & set(extra or ()))
        if reserved:
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(reserved)}",
                "the request has fields of its own for it",
                "use the field of that name",
                field="chat_template_kwargs",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "one goes on with the last turn, the other opens a new one",
                "set add_generation_prompt to false",
                field="continue_final_message",
            )
        turns = normalise(messages, self.abilities)
        if continue_final_message:
            turns[-1]["content"] = _marked(turns[-1]["content"] or "")
        prompt = self._run(turns, tools or None, add_generation_prompt, extra or {})
        if not continue_final_message:
            return prompt
        kept, mark, _ = prompt.rpartition(_END_MARK)
        if not mark:
            raise RequestError(
                "the last message cannot be continued",
                "the chat template does not print its text",
                "let the conversation end with a turn of text",
                field="continue_final_message",
            )
        return kept

    def _run(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        variables = {**self._special, **extra}
        try:
            return self._template.render(
                variables,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        except _Refused as refusal:
            raise RequestError(
                str(refusal), "the model's chat template refuses this conversation", code="chat_template"
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # AttributeError and its like are what a sandboxed expression raises on values that it did not expect.
            raise RequestError(
                f"the chat template could not render these messages: {error}",
                f"{type(error).__name__} inside the template",
                "check the roles, contents and tools of the messages",
                code="chat_template",
            ) from error
        except RecursionError:
            raise RequestError(
                "the messages are nested too deeply", "the chat template could not print them", code="chat_template"
            ) from None

    def _probe(self, source: str) -> TemplateAbilities:
        parts = self._try([{"role": "user", "content": [{"type": "text", "text": _NEEDLE}]}])
        shapes = ({_NEEDLE: "x"}, json.dumps({_NEEDLE: "x"}))
        objects, texts = (self._try(_probe_calls(shape)) for shape in shapes)
        null = None
        if _NEEDLE not in objects + texts:
            objects, texts, null = (*(self._try(_probe_calls(shape, content=None)) for shape in shapes), True)
        roles = ("system", "user", "system", "assistant", "user", "system")
        turns = self._try([{"role": role, "content": f"{_NEEDLE} {number}"} for number, role in enumerate(roles)])
        places = [turns.find(f"{_NEEDLE} {number}") for number in range(len(roles))]
        # A Python spelling of the value means that the template only printed what it was given.
        by_object = _NEEDLE in objects and f"{{'{_NEEDLE}'" not in objects
        object_arguments = by_object or _NEEDLE not in texts
        content, shape = (None if null else ""), shapes[not object_arguments]
        twice = self._try(_probe_calls(shape, content=content, count=2)).count(_NEEDLE)
        return TemplateAbilities(
            content_parts=_NEEDLE in parts and "{'type'" not in parts and '{"type"' not in parts,
            object_arguments=object_arguments,
            developer_role="developer" in source,
            late_system=-1 not in places and places == sorted(places),
            parallel_calls=twice > 1 or _NEEDLE not in objects + texts,
            null_content=bool(null) and _NEEDLE in objects + texts,
        )

    def _try(self, messages: list[Mapping[str, Any]]) -> str:
        try:
            return self._run(messages, None, False, {})
        except RequestError:
            return ""  # a probe: refusing is an answer


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own filter: that one escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _probe_calls(arguments: Any, *, content: str | None = "", count: int = 1) -> list[Mapping[str, Any]]:
    ids = [f"call0000{number}" for number in range(count)]
    function = {"name": "probe", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    results = [{"role": "tool", "content": "x", "tool_call_id": call_id} for call_id in ids]
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "tool_calls": calls}, *results]


def _marked(content: Any) -> Any:
    """``content`` with a mark behind its last text, to find in the rendered prompt."""
    if isinstance(content, str):
        return content + _END_MARK
    parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END_MARK
            return parts
    raise RequestError(
        "the last message cannot be continued", "it has no text", "end with text", field="continue_final_message"
    )

"""One conversation gives one prompt, whichever face it comes through."""

import json
import time

import pytest
from hypothesis import given
from wire_forms import as_messages, conversations

from atlas_core.server.chat import Chat
from atlas_core.server.messages.face import Messages, read
from atlas_core.server.messages.schema import CountRequest
from atlas_core.server.responses.items import read_items
from atlas_core.server.responses.translate import conversation
from atlas_core.server.schema import ChatRequest
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.messages import Ready

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
INFO = Ready(1 << 20, 1, 300, "f")


@pytest.fixture(scope="module")
def model(kit):
    return kit.model(
        template=ChatTemplate(TEMPLATE, {}, strftime=time.strftime), speech=kit.speech("", tools=("hermes",))
    )


def plain(messages):
    """What every face can say: no images, no results that failed, no empty answers."""
    found = []
    for message in messages:
        kept = {name: value for name, value in message.items() if name != "is_error"}
        if isinstance(kept["content"], list):
            kept["content"] = [
                part if part["type"] == "text" else {"type": "text", "text": "(image)"} for part in kept["content"]
            ]
        if kept["role"] == "assistant" and not kept["content"] and not kept.get("tool_calls"):
            kept["content"] = "Done."
        found.append(kept)
    return found


def as_items(messages):
    """The input of a request to the responses endpoint."""
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            output = (
                content
                if isinstance(content, str)
                else [{"type": "input_text", "text": part["text"]} for part in content]
            )
            yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
            continue
        if "reasoning_content" in message:
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            yield {"type": "reasoning", "summary": [], "content": [thought]}
        if content:
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            yield {"role": message["role"], "content": [{"type": kind, "text": part["text"]} for part in parts]}
        for call in message.get("tool_calls", ()):
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


@given(conversations().map(plain))
def test_the_prompt_is_the_same(model, messages):
    def prompt(internal):
        return Chat().prompts(ChatRequest(messages=internal), model, INFO)[0].ids

    sent = json.loads(json.dumps(messages))
    translated, _ = read(CountRequest, json.loads(json.dumps(as_messages(messages))))
    items, _ = read_items(list(as_items(sent)), "input", lambda prefix: f"{prefix}x")
    assert prompt(sent) == Messages().prompt(translated, model, INFO).ids
    assert prompt(sent) == prompt(conversation(items))

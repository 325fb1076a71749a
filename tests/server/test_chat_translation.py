"""Whatever comes as a chat request is answered, or refused by the name of a field: nothing else is ever raised."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.server.chat import Chat
from atlas_core.server.translate import sampling_params
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.errors import RequestError
from atlas_core.vocab.messages import Ready

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
WORDS = st.sampled_from(
    ["type", "role", "content", "text", "user", "assistant", "system", "developer", "tool", "function", "name", "arguments", "{}",
     "tool_calls", "tool_call_id", "id", "reasoning_content", "image_url", "url", "input_audio", "auto", "required", "none", "json_schema",
     "json_object", "schema", "mode", "tools", "allowed_tools", "custom", "parameters", "strict", "regex", "choice", "grammar", "json"]
)  # fmt: skip
RUBBISH = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(allow_nan=False, allow_infinity=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=5)),
    max_leaves=12,
)
OBJECTS = st.dictionaries(WORDS, RUBBISH, max_size=5)
TYPED = st.builds(lambda kind, rest: {"type": kind, kind: rest, **rest}, WORDS, OBJECTS)
CALLS = st.builds(lambda function, rest: {**rest, "function": function}, OBJECTS, OBJECTS)
MESSAGES = st.builds(
    lambda role, content, calls, rest: {**rest, "role": role, "content": content, **({"tool_calls": calls} if calls else {})},
    st.sampled_from(["user", "assistant", "system", "developer", "tool", "function"]),
    st.one_of(st.just("hi"), RUBBISH, st.lists(TYPED, max_size=3)),
    st.one_of(st.none(), RUBBISH, st.lists(CALLS, max_size=2)), OBJECTS,
)  # fmt: skip
FIELDS = {
    "tools": st.one_of(RUBBISH, st.lists(TYPED, max_size=2)), "tool_choice": st.one_of(RUBBISH, TYPED), "parallel_tool_calls": RUBBISH,
    "response_format": st.one_of(RUBBISH, TYPED), "structured_outputs": OBJECTS, "logit_bias": RUBBISH, "stop": RUBBISH, "n": RUBBISH,
    "chat_template_kwargs": OBJECTS, "continue_final_message": RUBBISH, "reasoning_effort": RUBBISH, "max_tokens": RUBBISH,
    "thinking_token_budget": RUBBISH, "temperature": RUBBISH, "seed": RUBBISH, "top_logprobs": RUBBISH, "functions": RUBBISH,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(kit):
    template = ChatTemplate(TEMPLATE, {}, strftime=time.strftime)
    return kit.model(template=template, speech=kit.speech("", tools=("hermes",), reasoning=("think",)))


@given(
    messages=st.one_of(RUBBISH, st.lists(MESSAGES, max_size=4)),
    more=st.lists(st.sampled_from([*FIELDS]), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
)
def test_rubbish(model, messages, more):
    face, info = Chat(), Ready(512, 1, 300, "f")
    try:
        request, _ = face.read({"messages": messages, **more})
        face.count(request)
        face.reading(request, model)
        sampling_params(request, {}, info)
        face.prompts(request, model, info)
    except RequestError as error:
        assert error.field is None or error.field.split("[")[0].split(".")[0] in {"messages", *more}, error
        assert error.field is not None or error.code == "chat_template", error

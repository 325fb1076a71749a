"""Every name that clients have for thoughts comes to the same wish."""

import pytest

from atlas_core.server.messages.schema import UNSUPPORTED as OF_MESSAGES
from atlas_core.server.messages.schema import MessagesRequest
from atlas_core.server.responses.schema import UNSUPPORTED as OF_RESPONSES
from atlas_core.server.responses.schema import ResponsesRequest
from atlas_core.server.schema import ChatRequest, read_request
from atlas_core.server.thinking import Wish, thinking_wish
from atlas_core.vocab.errors import RequestError

TURNS = [{"role": "user", "content": "x"}]
ON = {"enable_thinking": True, "thinking": True}


def wish(operators=None, **body):
    return thinking_wish(read_request(ChatRequest, {"messages": TURNS, **body}), operators)


def test_nothing_said():
    assert wish() == Wish(True, None, {})
    assert wish(operators=8) == Wish(True, 8, {})


@pytest.mark.parametrize(
    "body",
    [
        {"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"}, {"thinking_token_budget": 0}, {"thinking_budget": 0}, {"max_thinking_tokens": 0},
        {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"reasoning": {"max_tokens": 0}},
        {"chat_template_kwargs": {"thinking_budget": 0}}, {"chat_template_kwargs": {"reasoning_effort": "none"}},
        {"enable_thinking": True, "thinking": {"type": "disabled"}}, {"enable_thinking": True, "reasoning_effort": "none"},
    ],
)  # fmt: skip
def test_whatever_asks_for_no_thought_wins(body):
    assert not wish(**body).wanted
    assert "enable_thinking" not in wish(**body).variables


@pytest.mark.parametrize(
    "body", [{"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"thinking": {"type": "adaptive"}}, {"reasoning": {"enabled": True}}]
)  # fmt: skip
def test_whatever_asks_for_a_thought_tells_the_template(body):
    assert wish(**body) == Wish(True, None, ON)
    own = {"thinking": False, "more": 1}
    assert wish(**body, chat_template_kwargs=own).variables == {"enable_thinking": True, "thinking": False, "more": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"thinking_token_budget": 9}, {"thinking_budget": 9}, {"max_thinking_tokens": 9}, {"reasoning": {"max_tokens": 9}},
        {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"chat_template_kwargs": {"thinking_budget": 9}},
        {"thinking_budget": 9, "max_thinking_tokens": 12, "thinking_token_budget": 10},
    ],
)  # fmt: skip
def test_the_least_budget_counts(body):
    assert [wish(operators, **body).budget for operators in (None, 9, 20, 4, 0)] == [9, 9, 9, 4, 0]


def test_a_variable_that_is_no_number_of_tokens_is_the_templates_alone():
    for value in (True, -1, "9", 2.5, None):
        assert wish(chat_template_kwargs={"thinking_budget": value}) == Wish(True, None, {"thinking_budget": value})
    for value in (True, ["high"], "unheard", {}):
        asked = {"reasoning_effort": value}
        assert wish(8, chat_template_kwargs=asked) == Wish(True, 8, asked)


def test_efforts_in_their_order():
    variables = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    field, member = {"reasoning_effort": "high"}, {"reasoning": {"effort": "xhigh"}}
    found = [wish(8, **variables), wish(8, **variables, **field), wish(8, **variables, **field, **member)]
    assert [(each.variables["reasoning_effort"], each.budget) for each in found] == [
        ("low", 4),
        ("high", 16),
        ("high", 32),
    ]


def test_thoughts_cannot_be_left_out():
    assert wish(reasoning={"exclude": False}) == Wish()
    with pytest.raises(RequestError) as caught:
        wish(reasoning={"exclude": True})
    assert (caught.value.kind, caught.value.field) == ("unsupported", "reasoning.exclude")


@pytest.mark.parametrize(
    ("kind", "unsupported", "body"),
    [(ResponsesRequest, OF_RESPONSES, {"input": "x"}), (MessagesRequest, OF_MESSAGES, {"messages": TURNS, "max_tokens": 9})],
)  # fmt: skip
@pytest.mark.parametrize(
    "more",
    [
        {"enable_thinking": False}, {"thinking_budget": 9}, {"max_thinking_tokens": 9}, {"reasoning_effort": "low"}, {"logit_bias": {"1": 2}},
        {"structured_outputs": {"regex": "a"}}, {"stop_token_ids": [1]}, {"regex": "a"}, {"json_schema": {}}, {"guided_json": {}}, {"timeout": 5}, {"top_n_sigma": 1.0},
    ],
)  # fmt: skip
def test_what_the_other_faces_would_ignore_is_refused(kind, unsupported, body, more):
    with pytest.raises(RequestError) as caught:
        read_request(kind, {**body, **more}, unsupported)
    assert (caught.value.kind, [caught.value.field]) == ("unsupported", list(more))
    assert read_request(kind, {**body, **dict.fromkeys(more)}, unsupported)

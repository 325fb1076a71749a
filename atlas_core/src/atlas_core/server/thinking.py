"""What a request of the chat endpoint says about thoughts, under any of the names that clients have for it. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from atlas_core.server.schema import ChatRequest
from atlas_core.vocab.errors import RequestError

_SCALES = {"minimal": 0.25, "low": 0.5, "medium": 1.0, "high": 2.0, "xhigh": 4.0, "max": 4.0}
"""What an effort makes of the operator's budget for thoughts."""
_TOLD = {"xhigh": "high", "max": "high"}
"""Efforts under the name that chat templates know."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether there shall be a thought."""


class Wish(Struct, frozen=True):
    """``wanted`` false asks for no thought. ``budget`` are most tokens of it. ``variables`` are those of the template that tell of it."""

    wanted: bool = True
    budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def thinking_wish(request: ChatRequest, operators: int | None) -> Wish:
    """What ``request`` asks for where the operator's budget at medium effort is ``operators``.

    Of efforts ``reasoning.effort`` counts before ``reasoning_effort``, and both before that among the template's variables. Of budgets
    the least counts, the operator's at this effort included. Whatever asks for no thought wins. Raises RequestError.
    """
    if request.reasoning is not None and request.reasoning.exclude:
        raise RequestError(
            "reasoning.exclude is not supported", "thoughts stand apart from the answer, and are always shown",
            "leave it out, and pass over them", kind="unsupported", field="reasoning.exclude", code="unsupported_parameter",
        )  # fmt: skip
    variables = dict(request.chat_template_kwargs or {})
    own = request.reasoning.effort if request.reasoning else None
    effort = own or request.reasoning_effort
    if effort is not None:
        variables["reasoning_effort"] = _TOLD.get(effort, effort)
    else:
        effort = variables.get("reasoning_effort")
    budget = _budget(request, variables.get("thinking_budget"), effort, operators)
    mode = request.thinking.type if request.thinking else None
    switches = (request.enable_thinking, request.reasoning.enabled if request.reasoning else None)
    off = False in switches or mode == "disabled" or effort == "none" or budget == 0
    if not off and (True in switches or mode is not None):
        variables = dict.fromkeys(SWITCHES, True) | variables
    return Wish(not off, budget, variables)


def _budget(request: ChatRequest, variable: Any, effort: Any, operators: int | None) -> int | None:
    asked = [request.thinking_token_budget, request.thinking_budget, request.max_thinking_tokens]
    asked += [request.thinking.budget_tokens] if request.thinking else []
    asked += [request.reasoning.max_tokens] if request.reasoning else []
    asked += [variable] if isinstance(variable, int) and not isinstance(variable, bool) and variable >= 0 else []
    limits = [limit for limit in asked if limit is not None]
    if operators is not None:
        scale = _SCALES.get(effort, 1.0) if isinstance(effort, str) else 1.0
        # The smallest effort still is one; none at all is what the effort none asks for.
        limits.append(max(min(1, operators), int(operators * scale)))
    return min(limits, default=None)

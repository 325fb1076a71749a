"""Which dialect a model speaks: what the operator says, else what its family declares, else what its template shows."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from atlas_core.contracts.dialect import Dialect, ReasoningSyntax, ToolSyntax
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.resolve import Candidate, resolve


class Choice(Struct, frozen=True):
    """A dialect's name, who said it, and what every candidate answered where that was the template."""

    name: str = "plain"
    source: str = ""
    candidates: tuple[Candidate, ...] = ()


class Speech(Struct, frozen=True):
    """How a model writes calls and thoughts, with the names of the dialects that say so; ``choices`` are both, with their reasons."""

    tool_dialect: str = "plain"
    tools: ToolSyntax | None = None
    reasoning_dialect: str = "plain"
    reasoning: ReasoningSyntax | None = None
    stop: tuple[str, ...] = ()
    choices: tuple[Choice, Choice] = (Choice(), Choice())


def choose(
    dialects: Mapping[str, Dialect], template: str, *, tools: tuple[str, ...] = (), reasoning: tuple[str, ...] = ()
) -> Speech:
    """``tools`` and ``reasoning`` are names by right of way, empty ones left out; without any the ``template`` decides.

    Raises UsageError for a name that no dialect has, ResolveError when two dialects claim the template alike.
    """
    by_tools, calls = _one(dialects, template, tools, "--tool-call-parser", lambda dialect: dialect.tools is not None)
    by_reasoning, thoughts = _one(
        dialects, template, reasoning, "--reasoning-parser", lambda dialect: dialect.reasoning is not None
    )
    return Speech(
        by_tools.name if by_tools else "plain",
        by_tools.tools if by_tools else None,
        by_reasoning.name if by_reasoning else "plain",
        by_reasoning.reasoning if by_reasoning else None,
        by_tools.stop if by_tools else (),
        (calls, thoughts),
    )


def _one(
    dialects: Mapping[str, Dialect], template: str, names: tuple[str, ...], flag: str, has: Callable[[Dialect], bool]
) -> tuple[Dialect | None, Choice]:
    able = {name: dialect for name, dialect in dialects.items() if has(dialect)}
    for index, name in enumerate(names):
        if not name:
            continue
        choice = Choice(name, "the model's preset or plugin" if index else flag)
        if name == "plain":
            return None, choice
        if name not in able:
            raise UsageError(
                f"there is no dialect {name} for {flag}",
                f"there are plain, {', '.join(sorted(able))}",
                "choose one of them",
            )
        return able[name], choice
    found = resolve(sorted(able.items()), lambda dialect: dialect.detect(template))
    return found.winner, Choice(found.name or "plain", "the chat template", tuple(found.candidates))

"""Which dialect a model speaks: what the operator says, else what its family declares, else what its template shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atlas_core.contracts.dialect import Dialect, ReasoningSyntax, ToolSyntax
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.resolve import resolve


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model writes calls and thoughts, with the names of the dialects that say so."""

    tool_dialect: str = "plain"
    tools: ToolSyntax | None = None
    reasoning_dialect: str = "plain"
    reasoning: ReasoningSyntax | None = None
    stop: tuple[str, ...] = ()


def choose(
    dialects: Mapping[str, Dialect], template: str, *, tools: tuple[str, ...] = (), reasoning: tuple[str, ...] = ()
) -> Speech:
    """``tools`` and ``reasoning`` are names by right of way, empty ones left out; without any the ``template`` decides.

    Raises UsageError for a name that no dialect has, ResolveError when two dialects claim the template alike.
    """
    by_tools = _one(dialects, template, tools, "--tool-call-parser", lambda dialect: dialect.tools is not None)
    by_reasoning = _one(
        dialects, template, reasoning, "--reasoning-parser", lambda dialect: dialect.reasoning is not None
    )
    return Speech(
        by_tools.name if by_tools else "plain",
        by_tools.tools if by_tools else None,
        by_reasoning.name if by_reasoning else "plain",
        by_reasoning.reasoning if by_reasoning else None,
        by_tools.stop if by_tools else (),
    )


def _one(
    dialects: Mapping[str, Dialect], template: str, names: tuple[str, ...], flag: str, has: Callable[[Dialect], bool]
) -> Dialect | None:
    able = {name: dialect for name, dialect in dialects.items() if has(dialect)}
    for name in filter(None, names):
        if name == "plain":
            return None
        if name not in able:
            raise UsageError(
                f"there is no dialect {name} for {flag}",
                f"there are plain, {', '.join(sorted(able))}",
                "choose one of them",
            )
        return able[name]
    return resolve(sorted(able.items()), lambda dialect: dialect.detect(template)).winner

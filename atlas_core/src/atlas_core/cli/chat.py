"""``atlas chat``: a conversation on the terminal, with a running server or with a model in this process."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import click

from atlas_core.assembly.environment import client_key
from atlas_core.cli.options import SectionedCommand, settings_from, settings_options
from atlas_core.settings import OPTIONS
from atlas_core.vocab.errors import AtlasError, EngineError, UsageError

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[tuple[str, str | None]]]
"""From a conversation to pieces of the answer: (text, why it ended: None but for the last)."""

_ENGINE = (
    "revision", "load_format", "transcode", "chat_template", "hardware", "numerics", "dtype", "block_size", "threads", "memory",
    "max_seq_len", "max_prefill_tokens",
)  # fmt: skip
_HELP = "/reset begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer; // begins a message with a slash"


@click.command("chat", cls=SectionedCommand)
@settings_options(*_ENGINE)
@click.option("--url", default=None, help="Talk to this server instead; MODEL is then the name to ask for.")
@click.option("--api-key", default=None, help="Key that the server wants. [ATLAS_API_KEY]")
@click.option("--system", default=None, help="System message.")
@click.option("--temperature", type=click.FloatRange(min=0), default=None, help="0 takes the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=None, help="Share of probability to choose from.")
@click.option("--seed", type=int, default=None, help="Makes answers repeatable.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Most tokens of one answer.")
def command(url: str | None, api_key: str | None, system: str | None, **params: Any) -> None:
    """Chat with a model on the terminal.

    MODEL is loaded into this process, as atlas serve would. With --url a running server answers. When standard input is no
    terminal, all of it is one prompt, and the answer alone is printed.
    """
    sampling = {name: params.pop(name) for name in ("temperature", "top_p", "seed", "max_tokens")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    with ExitStack() as stack:
        prompt = None if sys.stdin.isatty() else _piped()
        answer = _local(params, sampling, stack) if url is None else _remote(url, api_key, params, sampling)
        conversation = [{"role": "system", "content": system}] if system else []
        if prompt is not None:
            _once(answer, [*conversation, {"role": "user", "content": prompt}])
        else:
            click.echo(_HELP, err=True)
            converse(answer, conversation)


def converse(answer: Answer, opening: list[Message]) -> None:
    """Turn after turn, until /quit or the end of input. An error ends a turn, not the conversation, unless the engine is gone."""
    with suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() a history and keys to edit with
    history = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        if line == "/quit":
            return
        if line == "/reset":
            history = list(opening)
            click.echo("(a new conversation)", err=True)
        elif line.startswith("/") and not line.startswith("//"):
            click.echo(f"there is no command {line.split()[0]}; {_HELP}", err=True)
        elif line:
            history.append({"role": "user", "content": line.removeprefix("/") if line.startswith("//") else line})
            _turn(answer, history)


def _turn(answer: Answer, history: list[Message]) -> None:
    """Print an answer to ``history`` and add it; after an error the question is taken back."""
    pieces: list[str] = []
    ended: str | None = None
    try:
        for text, finish in answer(history):
            pieces.append(text)
            click.echo(text, nl=False)
            ended = finish or ended
    except KeyboardInterrupt:
        ended = "interrupt"
    except AtlasError as error:
        if isinstance(error, EngineError):
            raise
        click.echo(f"error: {error}", err=True)
        history.pop()
        return
    click.echo()
    _tell(ended)
    history.append({"role": "assistant", "content": "".join(pieces)})


def _once(answer: Answer, conversation: list[Message]) -> None:
    ended: str | None = None
    for text, finish in answer(conversation):
        click.echo(text, nl=False)
        ended = finish or ended
    click.echo()
    _tell(ended)


def _tell(ended: str | None) -> None:
    if ended == "length":
        click.echo("(cut off: it reached the most tokens allowed)", err=True)
    elif ended == "interrupt":
        click.echo("(stopped)", err=True)


def _piped() -> str:
    prompt = sys.stdin.read().strip()
    if not prompt:
        raise UsageError("there is no prompt", "standard input is empty", "pipe a prompt in, or run it on a terminal")
    return prompt


def _local(params: dict[str, Any], sampling: dict[str, Any], stack: ExitStack) -> Answer:
    settings = settings_from(params)
    if settings.model is None:
        raise UsageError(
            "no model is given", "nobody would answer", "name one, for example: atlas chat smollm2; or --url"
        )
    # Here, so that --help and mistakes do not wait for the imports of an engine.
    from atlas_core.llm import LLM

    llm = stack.enter_context(LLM.of(settings))

    def answer(history: list[Message]) -> Iterator[tuple[str, str | None]]:
        for delta in llm.stream_chat(history, **sampling):
            yield delta.text, delta.finish

    return answer


def _remote(url: str, api_key: str | None, params: dict[str, Any], sampling: dict[str, Any]) -> Answer:
    foreign = [OPTIONS[name].flag for name in _ENGINE if params.get(name) is not None]
    if params.get("config") is not None:
        foreign.append("--config")
    if foreign:
        raise UsageError(f"{', '.join(foreign)} does not go with --url", "the server has its own", "leave it out")
    from atlas_core.remote.server import RemoteServer

    server = RemoteServer(url, api_key=api_key or client_key())
    model = params.get("model") or server.models()[0]

    def answer(history: list[Message]) -> Iterator[tuple[str, str | None]]:
        for event in server.stream("/chat/completions", {"model": model, "messages": history, **sampling}):
            for choice in event.get("choices") or ():
                yield (choice.get("delta") or {}).get("content") or "", choice.get("finish_reason")

    return answer

"""``POST /v1/completions``."""

from collections.abc import Mapping, Sequence
from typing import Any

from atlas_core.server.answer import Reading
from atlas_core.server.logprobs import LegacyLogprobs, prompt_logprobs
from atlas_core.server.ports import ServedModel
from atlas_core.server.schema import CompletionRequest, read_request, unknown_fields
from atlas_core.server.sse import DONE, Chunks, ChunkTemplate, encode
from atlas_core.server.structured import answer_grammar, form_field
from atlas_core.server.translate import check_prompt, split_prompts
from atlas_core.server.turn import Output, Prompt, Turn, usage
from atlas_core.text.grammar import check, whole_grammar
from atlas_core.vocab.messages import Delta, Position, Ready, TokenLogprob


class Completions:
    """The completions face: text goes to the model as it is."""

    id_prefix = "cmpl-"

    def read(self, body: Mapping[str, Any]) -> tuple[CompletionRequest, list[str]]:
        """See Face."""
        return read_request(CompletionRequest, body), unknown_fields(CompletionRequest, body)

    def count(self, request: CompletionRequest) -> int:
        """The prompts in the field of that name."""
        prompt = request.prompt
        return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)

    def reading(self, request: CompletionRequest, model: ServedModel) -> Reading:
        """All is text."""
        return Reading()

    def quick(self, request: CompletionRequest) -> bool:
        """Ids of one prompt are only compared, which holds up all other threads whoever does it."""
        is_ids = not isinstance(request.prompt, str) and isinstance(request.prompt[0], int)
        return is_ids and not request.echo and form_field(request) is None

    def prompts(self, request: CompletionRequest, model: ServedModel, info: Ready) -> list[Prompt]:
        """Every prompt, from text or ids. An echo of ids shows control tokens too: it is what was sent."""
        form = answer_grammar(request)
        grammar = "" if form is None else whole_grammar([form], None, "closed")
        if grammar:
            check(grammar, form_field(request) or "structured_outputs")
        found = []
        split = split_prompts(request.prompt)
        for index, prompt in enumerate(split):
            field = "prompt" if len(split) == 1 else f"prompt[{index}]"
            if isinstance(prompt, str):
                special = request.add_special_tokens is not False
                ids = model.tokenizer.encode(prompt, add_special=special, parse_special=True)
                checked, echo = check_prompt(ids, info, field), prompt
            else:
                checked = check_prompt(prompt, info, field)
                echo = model.tokenizer.decode(checked, skip_special=False) if request.echo else ""
            scored = request.echo and request.logprobs is not None
            start = _token(model, checked[0]) if scored else None
            found.append(Prompt(checked, echo if request.echo else "", grammar=grammar, start=start))
        return found

    def whole(self, turn: Turn, outputs: Sequence[Output]) -> dict[str, Any]:
        """A ``text_completion``."""
        return {
            **_envelope(turn),
            "choices": [
                {**_choice(turn, drawn, outputs[drawn]), "index": index}
                for index, drawn in enumerate(_best(turn, outputs))
            ],
            "usage": usage(outputs, turn.n),
        }

    def writer(self, turn: Turn) -> "CompletionChunks":
        """A writer of ``text_completion`` events."""
        return CompletionChunks(turn)


class CompletionChunks(Chunks):
    """Pieces of text; the echo comes before the first, the finish reason with the last."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._template = ChunkTemplate(_envelope(turn), usage_null=turn.include_usage)
        self._opened = [False] * len(turn.sequences)
        self._logprobs = [LegacyLogprobs(turn.hidden) for _ in turn.sequences]
        self._heads = [f'{{"index":{index},"text":'.encode() for index in range(len(turn.sequences))]
        self._scores: list[list[Position]] = [[] for _ in turn.sequences]

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Events for ``delta``: none while its text is held back and nothing else was asked for."""
        text = delta.text
        self._scores[index] += delta.prompt_logprobs
        if not delta.tokens and delta.finish is None:
            return b""  # the prompt is not through, and an echo comes with all of its log-probabilities
        first = not self._opened[index]
        if first:
            text = self._turn.prompt_of(index).echo + text
        shown = text or (delta.logprobs and self._turn.wants_logprobs) or (delta.tokens and self._turn.token_ids)
        if not shown and delta.finish is None:
            return b""
        self._opened[index] = True
        choice = self._heads[index] + encode(text) + b',"logprobs":'
        prompt = self._turn.prompt_of(index) if first else None
        choice += encode(_logprobs(self._turn, self._logprobs[index], prompt, self._scores[index], delta.logprobs))
        choice += b',"finish_reason":' + encode(delta.finish)
        if self._turn.token_ids:
            choice += b',"token_ids":' + encode(delta.tokens)
            if first:
                choice += b',"prompt_token_ids":' + encode(self._turn.prompt_of(index).ids)
        return self._template.choice(choice + b"}")

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """The usage, if it was asked for, and the DONE mark."""
        return (self._template.closing(usage(outputs, self._turn.n)) if self._turn.include_usage else b"") + DONE


def _envelope(turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.id, "object": "text_completion", "created": turn.created, "model": turn.model,
        "system_fingerprint": turn.fingerprint,
    }  # fmt: skip


def _best(turn: Turn, outputs: Sequence[Output]) -> list[int]:
    """The choices that are given: of each prompt's those whose tokens have the greatest mean log-probability, best first."""
    if turn.kept is None or turn.kept == turn.n:
        return list(range(len(outputs)))

    def badness(choice: int) -> float:
        chances = [position.chosen.logprob for position in outputs[choice].positions]
        return -sum(chances) / len(chances) if chances else 0.0

    groups = (range(first, first + turn.n) for first in range(0, len(outputs), turn.n))
    return [choice for group in groups for choice in sorted(group, key=badness)[: turn.kept]]


def _choice(turn: Turn, index: int, output: Output) -> dict[str, Any]:
    prompt = turn.prompt_of(index)
    choice = {
        "index": index,
        "text": prompt.echo + output.text,
        "logprobs": _logprobs(turn, LegacyLogprobs(turn.hidden), prompt, output.prompt_positions, output.positions),
        "finish_reason": output.finish,
    }
    if turn.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_positions, turn.prompt_logprobs)
    return choice | ({"token_ids": output.tokens, "prompt_token_ids": prompt.ids} if turn.token_ids else {})


def _logprobs(
    turn: Turn, writer: LegacyLogprobs, prompt: Prompt | None, scores: Sequence[Position], positions: Sequence[Position]
) -> dict[str, list[Any]] | None:
    """The ``logprobs`` object of a piece, behind that of ``prompt`` where the piece is the first."""
    if not turn.wants_logprobs:
        return None
    if prompt is None or prompt.start is None:
        return writer.piece(positions)
    wanted = turn.sequences[0].sampling.logprobs
    scores = [Position(score.chosen, score.top[:wanted]) for score in scores]
    echoed = writer.echoed(prompt.start, scores, prompt.echo)
    return {
        name: values + added
        for (name, values), added in zip(echoed.items(), writer.piece(positions).values(), strict=True)
    }


def _token(model: ServedModel, token: int) -> TokenLogprob:
    data = model.tokenizer.token_bytes(token)
    return TokenLogprob(token, data.decode("utf-8", errors="replace"), 0.0, data)

"""``LLM``: prompts in, results out."""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from atlas_core.assembly.aside import Aside
from atlas_core.assembly.asked import settings_from_environment
from atlas_core.assembly.engine import Ledger, build, engine_of
from atlas_core.assembly.environment import discover_plugins, start_folder
from atlas_core.assembly.served import fetch, served_model
from atlas_core.engine.loop import Engine
from atlas_core.llm.asking import Asked, asked_chat, asked_prompts
from atlas_core.llm.local import LocalEngine
from atlas_core.llm.progress import Line
from atlas_core.llm.results import Gathered, Result
from atlas_core.plugins import Registry
from atlas_core.server.ports import ServedModel
from atlas_core.settings import OPTIONS, Settings
from atlas_core.settings.reading import with_defaults
from atlas_core.settings.sources import Level, Source
from atlas_core.vocab.errors import UsageError
from atlas_core.vocab.messages import Delta, Generate, Progress, Ready

Params = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
Messages = Sequence[Mapping[str, Any]]

_SERVER = "Server"
"""The section of options that only a server has a use for."""


class LLM:
    """A model, loaded into this process.

        with LLM("smollm2") as llm:
            for result in llm.generate(["The sky is", "Gravity is"], temperature=0, max_tokens=32):
                print(result.text)

    Threads may share one. Closing it (or leaving the ``with``) gives the device back.
    """

    def __init__(self, model: str | os.PathLike[str], *, progress: bool | None = None, **settings: Any) -> None:
        """Fetch the model if need be, load it, and return when it is ready.

        ``model`` is what ``atlas serve`` takes: a directory, a .gguf file, a Hub id or a catalogue name. ``settings`` are the options of
        ``atlas serve`` by name (``hardware="cpu"``, ``max_batch_size=16``), those of the HTTP server excepted; ATLAS_* variables and
        ATLAS_CONFIG hold for what is not given. ``progress`` None shows a line where standard error is a terminal.

        Raises AtlasError: what happened, why, and what to do.
        """
        self._set_up(_settings(model, settings), progress)

    @classmethod
    def of(cls, settings: Settings, *, progress: bool | None = None) -> Self:
        """An LLM of finished settings; otherwise as the constructor."""
        made = cls.__new__(cls)
        made._set_up(settings, progress)
        return made

    def _set_up(self, settings: Settings, progress: bool | None) -> None:
        self._progress = progress
        self._settings = settings
        line = Line(progress)
        try:
            self._engine, self._served = _start(self._settings, line)
        finally:
            line.clear()
        self._numbers = itertools.count()

    @property
    def info(self) -> Ready:
        """Context size, batch size, vocabulary size, and where the time and the memory of the start went."""
        return self._engine.info

    @property
    def settings(self) -> Settings:
        """What was asked for, each value with its source."""
        return self._settings

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: Params = None,
        **sampling: Any,
    ) -> list[Result]:
        """Continue one prompt or many, as text or as token ids; more than fit into a batch are queued.

        ``params`` and ``sampling`` are the fields of ``/v1/completions`` by name and with its defaults: max_tokens (16), temperature,
        top_p, top_k, min_p, the penalties, logit_bias, seed, stop, stop_token_ids, min_tokens, ignore_eos, n, logprobs and so on.
        A list of ``params`` has one for each prompt; ``sampling`` overrides all. Choice ``j`` of a seeded prompt has seed + j.

        Gives ``n`` results for each prompt, in order. Raises RequestError that names the field, before anything is generated.
        """
        asked = asked_prompts(prompts, params, sampling, self._served, self.info)
        return self._collect(asked)

    def chat(self, messages: Messages | Sequence[Messages], params: Params = None, **sampling: Any) -> list[Result]:
        """Answer one conversation or many, each a list of ``{"role": ..., "content": ...}``, through the model's chat template.

        ``params`` and ``sampling`` are the fields of ``/v1/chat/completions`` by name and with its defaults: without max_tokens, up to the
        context size. Otherwise as ``generate``.
        """
        return self._collect(asked_chat(messages, params, sampling, self._served, self.info))

    def stream_chat(self, messages: Messages, **sampling: Any) -> Iterator[Delta]:
        """Answer one conversation piece by piece: each has its ``text``, the last ``finish`` too. See ``chat``.

        Leaving the iterator ends the answer.
        """
        asked = asked_chat(messages, None, sampling, self._served, self.info)
        if len(asked) != 1:
            raise UsageError("a stream has one answer", f"{len(asked)} were asked for", "leave n out")
        return self._engine.run([self._request(asked[0])])

    def close(self) -> None:
        """End the engine and give the device back. Safe to call twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, asked: Asked) -> Generate:
        return Generate(f"llm-{next(self._numbers)}", asked.prompt, asked.sampling, time.monotonic())

    def _collect(self, asked: Sequence[Asked]) -> list[Result]:
        requests = [self._request(one) for one in asked]
        places = {request.id: place for place, request in enumerate(requests)}
        gathered = [Gathered() for _ in asked]
        results: dict[int, Result] = {}
        tokens, start, line = 0, time.monotonic(), Line(self._progress)
        try:
            for delta in self._engine.run(requests):
                place = places[delta.id]
                gathered[place].add(delta)
                tokens += len(delta.tokens)
                if delta.finish is not None:
                    one = asked[place]
                    results[place] = gathered[place].result(one.index, one.prompt, delta, one.sampling)
                line.generating(len(results), len(asked), tokens, time.monotonic() - start)
        finally:
            line.clear()
        return [results[place] for place in range(len(asked))]


class _Building(Struct, frozen=True):
    """Builds the engine on its own thread; see local.Build."""

    settings: Settings
    registry: Registry
    report: Callable[[Progress], None]

    def __call__(self) -> tuple[Engine, Callable[[], None]]:
        ledger = Ledger(self.report)
        built = build(self.settings, self.registry, ledger, folder=start_folder(self.settings))
        return engine_of(built, self.registry, ledger), built.close


def _start(settings: Settings, line: Line) -> tuple[LocalEngine, ServedModel]:
    registry = discover_plugins(settings)

    def fetched(done: int, total: int, note: str) -> None:
        line.loading(Progress("fetch", done, total, note))

    path = fetch(settings, registry, fetched)
    local = replace(settings, model=str(path), revision=None)
    with Aside() as aside:
        reading = aside.start(lambda: served_model(settings, local, registry))
        # As many again as a batch, so that a place that gets free is taken in the next step.
        engine = LocalEngine(
            _Building(local, registry, line.loading),
            lambda info: info.max_batch_size + min(info.max_batch_size, settings.max_queue),
        )
        try:
            return engine, reading.result()
        except BaseException:
            engine.close()
            raise


def _settings(model: str | os.PathLike[str], given: Mapping[str, Any]) -> Settings:
    """The settings of this model. Raises UsageError for unknown names, bad values, and options of the HTTP server."""
    foreign = [name for name in given if name in OPTIONS and OPTIONS[name].section == _SERVER]
    if foreign:
        raise UsageError(f"LLM has no {', '.join(foreign)}", "only an HTTP server has a use for it", "leave it out")
    values = {name: value for name, value in given.items() if value is not None}
    base = settings_from_environment({})
    return with_defaults(base, {**values, "model": os.fspath(model)}, Source(Level.FLAG, "LLM"))

"""The engine: a plain loop on one thread. Take messages, schedule, launch, collect, deliver."""

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from msgspec import Struct

from atlas_core.engine.failures import to_failure
from atlas_core.engine.grammar import Grammars, Matcher
from atlas_core.engine.output import Alternatives, Output, TokenText
from atlas_core.engine.pace import Load, Pace
from atlas_core.engine.restriction import Answer
from atlas_core.engine.wire import Message
from atlas_core.scheduler.plan import StepPlan
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.scheduler.sequence import Sequence as Running
from atlas_core.vocab.errors import AtlasError, EngineError, RequestError
from atlas_core.vocab.messages import Abort, Delta, Drain, FromEngine, Gauges, Generate, Ready, StepResult


class Closed(Struct, frozen=True):
    """Nobody listens any more, or (``error``) what they say is not understood: stop at once."""

    error: AtlasError | None = None


class Compiled(Struct, frozen=True):
    """The grammar of a request is there, or cannot be had."""

    id: str
    result: "Future[Matcher]"


Inbox = SimpleQueue[Message | Closed | Compiled]
QUIET = 2.0
"""Seconds without a request before something is prepared for later ones: who starts a server may be about to ask it."""
PIECE, GROWTH = 4, 4
"""Deltas of a step that are sent before the rest of it is turned into text, and how many times as many the next ones are.

The other process wakes up meanwhile, and a step of many rows still takes few messages.
"""
Emit = Callable[[FromEngine], None]


class StepOutput(Struct, frozen=True):
    """What a step gave, one entry for each of its plan's ``sample_row``.

    ``alternatives`` is None when nobody wanted any; ``vectors``, unless None, are what prompts were run for. ``experts`` are those that
    the step read, each mixture's distinct ones, and the mixtures, where they are counted.
    """

    sampled: Sequence[int]
    alternatives: Sequence[Alternatives] | None = None
    vectors: Sequence[bytes] | None = None
    experts: tuple[int, int] = (0, 0)


class StepRunner(Protocol):
    """Runs plans in order (see engine.runner).

    ``asynchronous`` says that ``launch`` returns before the step is done.
    """

    @property
    def asynchronous(self) -> bool:
        """Whether a step goes on after ``launch`` has returned."""
        ...

    def launch(self, plan: StepPlan) -> Any:
        """Begin a step; returns the ticket to collect it by. One that is ``late`` stops before it samples. Raises DeviceError."""
        ...

    def sample(self, ticket: Any) -> None:
        """Let the step that was launched last sample, now that all tokens before are known. Raises DeviceError."""
        ...

    def kind(self, ticket: Any) -> Hashable:
        """What a launched step has in common with those that take about as long as it for the same tokens; None, nothing."""
        ...

    def wait(self, ticket: Any) -> None:
        """Wait for a step, the oldest first. Raises DeviceError."""
        ...

    def collect(self, ticket: Any) -> StepOutput:
        """Wait for a step, the oldest first, and read what it gave. Raises DeviceError."""
        ...

    def close(self) -> None:
        """Give everything back; nothing is in flight that anybody waits for."""
        ...


class Engine:
    """A model that is ready to generate.

    ``eos`` are the tokens that end a turn; ``info`` is what the API process is told; without ``grammars`` requests that have one are
    refused, and ``eager`` has them prepared once there is nothing to do. With an asynchronous runner one step is always launched before the one before it is read; tokens that turn out to be
    past a request's end are never seen. Where a grammar waits for the token before, only the forward pass runs ahead. When the end of the
    step that runs can be predicted (engine.pace), the next one is put off until shortly before, so that requests that come meanwhile are in it.
    """

    def __init__(
        self, *, runner: StepRunner, scheduler: Scheduler, text: TokenText, eos: Sequence[int], info: Ready,
        clock: Callable[[], float] = time.monotonic, grammars: Grammars | None = None, eager: bool = False,
    ) -> None:  # fmt: skip
        self.info = info
        self._runner = runner
        self._scheduler = scheduler
        self._text = text
        self._eos = tuple(eos)
        self._clock = clock
        self._grammars = grammars
        self._inbox: Inbox = SimpleQueue()
        self._emit: Emit
        self._outputs: dict[str, Output] = {}
        self._answers: dict[str, Answer] = {}
        self._unstarted: dict[str, Output] = {}
        self._eager = eager
        self._compiling: dict[str, tuple[Generate, Output, Future[Matcher]]] = {}
        self._flight: deque[tuple[StepPlan, Any]] = deque()
        self._pace = Pace() if runner.asynchronous else None
        self._deltas: list[Delta] = []
        self._scoring: dict[Output, None] = {}
        self._steps = 0
        self._experts = self._mixtures = 0
        self._closed = False
        self._drain_until: float | None = None

    def run(self, inbox: Inbox, emit: Emit) -> None:
        """Serve until the inbox says Closed, or a Drain is done.

        Raises what makes the engine useless, DeviceError above all.
        """
        self._inbox, self._emit = inbox, emit
        while True:
            self._take(inbox)
            if self._closed:
                return
            if self._drain_until is not None and self._clock() >= self._drain_until:
                self._abort_all()
            collected = self._step()
            if collected or self._deltas:
                self._tell()
            if self._drain_until is not None and self._scheduler.idle and not self._flight and not self._compiling:
                return

    def close(self) -> None:
        """Release the device."""
        if self._grammars is not None:
            self._grammars.close()
        self._runner.close()

    def _take(self, inbox: Inbox) -> None:
        """Handle every message that has come, or comes while the next step has time; wait for one when there is nothing else to do."""
        idle = self._scheduler.idle and not self._flight and not self._deltas and self._drain_until is None
        until = None if self._pace is None else self._pace.launch_at(self._clock())
        try:
            while not self._closed:
                self._handle(self._next(inbox, idle, until))
                idle = False
        except Empty:
            return

    def _next(self, inbox: Inbox, idle: bool, until: float | None) -> Message | Closed | Compiled:
        # A grammar that is being compiled may hold the interpreter for longer than any margin.
        if until is not None and not self._compiling:
            left = until - self._clock()
            if left <= 0:
                raise Empty  # what is still there has its turn as soon as the step is launched
            return inbox.get(timeout=left)
        if idle and self._eager and self._grammars is not None:
            try:
                return inbox.get(timeout=QUIET)
            except Empty:
                # Now it holds up nobody; the first request with a grammar would have all running streams wait for it.
                self._eager = False
                self._grammars.prepare()
        return inbox.get(block=idle)

    def _handle(self, message: Message | Closed | Compiled) -> None:
        match message:
            case Closed(error):
                if error is not None:
                    raise error
                self._closed = True
            case Generate():
                self._generate(message)
            case Compiled():
                self._compiled(message)
            case Abort():
                self._abort(message.id)
            case Drain():
                self._drain_until = self._clock() + message.deadline
            case _:
                raise EngineError(f"{type(message).__name__} came from the API process", "it speaks another protocol")

    def _generate(self, request: Generate) -> None:
        try:
            if self._drain_until is not None:
                raise EngineError("the engine is shutting down", "no request is taken any more", state="draining")
            if request.embed != bool(self.info.vector_size):
                raise RequestError(
                    f"this model {'goes on with' if request.embed else 'embeds'} texts, and does nothing else",
                    "the request asks for the other" , "ask a server with another model", kind="unsupported", field="model",
                )  # fmt: skip
            output = Output(request, self._eos, self._text)
            if request.id in self._compiling or request.id in self._outputs:
                raise RequestError(
                    f"request {request.id} is already running", "ids of live requests are unique", field="id"
                )
            if request.grammar:
                self._compile(request, output)
            else:
                self._submit(request, output, None)
        except AtlasError as error:
            self._refuse(request, error)

    def _compile(self, request: Generate, output: Output) -> None:
        """Have the request's grammar compiled; it gets into the line when that is done."""
        if self._grammars is None:
            raise RequestError(
                "this engine has no grammars", "it was built without a tokenizer for them", "leave the form of the answer free",
                kind="unsupported",
            )  # fmt: skip
        inbox = self._inbox
        compiling = self._grammars.compile(
            request.grammar, request.sampling.shown_tokens, lambda result: inbox.put(Compiled(request.id, result))
        )
        self._compiling[request.id] = request, output, compiling

    def _compiled(self, message: Compiled) -> None:
        waiting = self._compiling.pop(message.id, None)
        if waiting is None or message.result.cancelled():
            return  # aborted meanwhile, or the engine ends
        request, output, _ = waiting
        try:
            self._submit(request, output, message.result.result())
        except AtlasError as error:
            self._refuse(request, error)

    def _submit(self, request: Generate, output: Output, matcher: Matcher | None) -> None:
        seed = request.sampling.seed
        seed = int.from_bytes(os.urandom(8)) if seed is None else seed
        limited = request.thinking is not None and request.thinking.budget is not None
        answer = Answer(matcher, request.thinking, output) if matcher is not None or limited else None
        self._scheduler.submit(request, seed=seed, stop_ids=output.stop_ids, restriction=answer)
        self._outputs[request.id] = self._unstarted[request.id] = output
        if answer is not None:
            self._answers[request.id] = answer

    def _refuse(self, request: Generate, error: AtlasError) -> None:
        failure = to_failure(error)
        self._deltas.append(Delta(request.id, finish="error", prompt_tokens=len(request.prompt), error=failure))

    def _abort(self, request_id: str) -> None:
        output = self._outputs.get(request_id)
        if output is not None:
            self._end(output, output.abort())
        elif request_id in self._compiling:
            _, output, compiling = self._compiling.pop(request_id)
            compiling.cancel()
            self._deltas.append(output.abort())

    def _abort_all(self) -> None:
        for request_id in (*self._outputs, *self._compiling):
            self._abort(request_id)

    def _step(self) -> bool:
        """Launch the next step if there is one, and collect the oldest unless it may still run.

        True when one was collected.
        """
        plan = self._scheduler.schedule()
        if plan is not None:
            if self._unstarted:
                self._note_start(plan)
            ticket = self._runner.launch(plan)
            self._flight.append((plan, ticket))
            self._steps += 1
            if self._pace is not None:
                self._pace.launched(Load(self._runner.kind(ticket), len(plan.token_ids), plan.attended), self._clock())
        ahead = 1 if self._runner.asynchronous else 0
        if not self._flight and not self._scheduler.idle:
            raise EngineError(
                "requests wait and none of them can run", "the scheduler is stuck", "report it, with the log"
            )
        if not self._flight or (plan is not None and len(self._flight) <= ahead):
            return False
        self._collect()
        if plan is not None and plan.late:
            self._runner.sample(self._flight[-1][1])
        return True

    def _note_start(self, plan: StepPlan) -> None:
        now = self._clock()
        for sequence in plan.sequences:
            output = self._unstarted.pop(sequence.id, None)
            if output is not None:
                output.started = now
                output.cached_tokens = sequence.found or 0

    def _collect(self) -> None:
        plan, ticket = self._flight.popleft()
        if self._pace is not None:
            asked = self._clock()
            self._runner.wait(ticket)
            self._pace.collected(asked, self._clock())
        result = self._runner.collect(ticket)
        self._experts += result.experts[0]
        self._mixtures += result.experts[1]
        alternatives = {}
        if result.alternatives is not None:
            for row, values in zip(plan.sample_row, result.alternatives, strict=True):
                if row >= 0:
                    alternatives[plan.sequences[row].id] = values
            self._score(plan, result.alternatives)
        vectors = {plan.sequences[row].id: v for row, v in zip(plan.sample_row, result.vectors or (), strict=False)}
        piece = PIECE
        accepted = self._scheduler.complete(plan, result.sampled)
        # Somebody waits for a first token, and prompts are the last rows of a step.
        accepted.sort(key=_goes_on)
        for sequence, token in accepted:
            if len(self._deltas) >= piece:
                self._tell()
                piece *= GROWTH
            output = self._outputs[sequence.id]
            found = alternatives.get(sequence.id)
            wanted = found if found is not None and found.ids[0] >= 0 else None
            answer = self._answers.get(sequence.id)
            try:
                if answer is not None and answer.failure:
                    raise EngineError("the answer's grammar failed", answer.failure[:500], "simplify it, and report it")
                whole = answer is not None and answer.done
                delta = output.push(token, wanted, last=sequence.generated >= sequence.max_new, whole=whole)
                if vectors:
                    delta = delta._replace(vector=vectors[sequence.id])
            except AtlasError as error:
                self._end(output, output.fail(error))
                continue
            if delta.finish is None:
                self._deltas.append(delta)
            else:
                self._end(output, delta)
        self._deltas += [output.told() for output in self._scoring if output.id in self._outputs and output.untold]
        self._scoring.clear()

    def _score(self, plan: StepPlan, alternatives: Sequence[Alternatives]) -> None:
        """Take the log-probabilities of prompt tokens; they go out with what the step generates, if it does."""
        for scored in plan.scored:
            output = self._outputs.get(plan.sequences[scored.row].id)
            if output is not None and not plan.sequences[scored.row].finished:
                output.score(alternatives[scored.place])
                self._scoring[output] = None

    def _end(self, output: Output, delta: Delta) -> None:
        """Deliver a request's last delta and let the scheduler have its place."""
        sequence = self._scheduler.find(output.id)
        if sequence is not None:
            self._scheduler.finish(sequence)
        del self._outputs[output.id]
        self._answers.pop(output.id, None)
        self._unstarted.pop(output.id, None)
        self._deltas.append(delta)

    def _tell(self) -> None:
        self._emit(StepResult(tuple(self._deltas), self._gauges()))
        self._deltas.clear()

    def _gauges(self) -> Gauges:
        scheduler = self._scheduler
        return Gauges(
            scheduler.running,
            scheduler.waiting,
            scheduler.tokens_used,
            scheduler.tokens_total,
            self._steps,
            scheduler.preemptions,
            scheduler.tokens_kept,
            scheduler.tokens_evicted,
            scheduler.tokens_stateless,
            self._experts,
            self._mixtures,
        )


def _goes_on(accepted: tuple[Running, int]) -> bool:
    """Whether a token is not the first of its sequence."""
    return accepted[0].generated > 1

"""The runner over the null device: what its graphs find in memory becomes a plan again, for the scripted device to run."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from scripted import VOCAB, ScriptedDevice
from scripted_engine import LIMITS, alternatives, expected, make_engine
from test_loop import Session, request

from atlas_core.contracts.ops import Buffer
from atlas_core.engine.inputs import InputLayout, InputWriter
from atlas_core.engine.rings import Results, Rings
from atlas_core.engine.runner import Runner
from atlas_core.model.planner import Bucket
from atlas_core.ops.references import PROMPT_BIT
from atlas_core.ops.step import Count, Word
from atlas_core.runtime.null import Injection, NullBackend
from atlas_core.scheduler.plan import Counted, Scored
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.vocab.errors import DeviceError, EngineError
from atlas_core.vocab.kernel import Geometry, i32
from atlas_core.vocab.sampling import MAX_TOP_LOGPROBS

WIDE = 1 + MAX_TOP_LOGPROBS
RESULTS = Results("sampled", "logprob_values", "logprob_ids", "logits")


class LinkedBackend(NullBackend):
    """A null device whose kernels reach page-locked memory. ``before_delivery`` is what runs between the ends of a step."""

    def __init__(self, *, asynchronous, injection):
        super().__init__(asynchronous=asynchronous, injection=replace(injection, on_launch=self._act))
        self.capabilities = replace(self.capabilities, host_link=True)
        self.actions = []
        self.before_delivery = None

    def prepare_fetch(self, ring, target, fixed):
        def act():
            turn = np.frombuffer(self.view(ring.turn, 4), np.int32)
            place = np.frombuffer(ring.memory, np.int32).reshape(ring.places, -1)[turn[0] % ring.places]
            live = fixed + 2 * int(place[Count.UPDATES])
            np.frombuffer(self.view(target, 4 * live), np.int32)[:] = place[:live]
            turn += 1

        return self._launch("fetch", act)

    def prepare_deliver(self, ring, results):
        number = len(self.actions)

        def act():
            self.before_delivery(number)
            counts = np.frombuffer(self.view(results.counts, 4 * len(Count)), np.int32)
            live = int(counts[Count.ROWS])
            turn = np.frombuffer(self.view(ring.turn, 4), np.int32)[0] - 1
            place = np.frombuffer(ring.memory, np.int32).reshape(ring.places, -1)[turn % ring.places]
            start = 0
            for address, width in ((results.sampled, 1), (results.values, results.wide), (results.ids, results.wide)):
                place[start : start + live * width] = np.frombuffer(self.view(address, 4 * live * width), np.int32)
                start += results.rows * width

        return self._launch("deliver", act)

    def _launch(self, entry, act):
        self.actions.append(act)
        return self.prepare_launch(("link", entry), Geometry(), [i32(len(self.actions) - 1)])

    def _act(self, launch):
        self.actions[launch.args[0].value]()


@dataclass
class Machine:
    """A null device with graphs that read their inputs from device memory, as kernels do."""

    linked: bool = False
    asynchronous: bool = False
    limits: object = LIMITS
    fail_at: int | None = None
    used: list = field(default_factory=list)
    segments: list = field(default_factory=list)
    captured: list = field(default_factory=list)

    def __post_init__(self):
        limits = self.limits
        self.backend = (LinkedBackend if self.linked else NullBackend)(
            asynchronous=self.asynchronous,
            injection=Injection(fail_at=self.fail_at, sticky=True, on_graph=self._on_graph),
        )
        slots = limits.layout.slots
        self.buckets = [
            Bucket(limits.max_step_tokens, slots, slots, limits.max_updates, limits.max_prefill_tokens),
            *(Bucket(rows, rows, rows, limits.max_updates, 1) for rows in (1, slots)),
        ]
        self.device = ScriptedDevice(limits)
        self.stream = self.backend.create_stream()
        self.base = self._alloc(max(InputLayout(bucket).nbytes for bucket in self.buckets)).address
        self.states = {
            "slots": self._alloc(4 * limits.layout.words),
            "penalty": self._alloc(4 * VOCAB * limits.penalty_rows),
            "mask": self._alloc(8 * slots),
        }
        for state in self.states.values():
            self.array(state)[:] = 77
        self.activations = {
            "sampled": self._alloc(4 * slots),
            "logprob_values": self._alloc(4 * slots * WIDE),
            "logprob_ids": self._alloc(4 * slots * WIDE),
            "logits": self._alloc(4 * slots * VOCAB),
        }
        self.graphs = {}
        self.deliveries = {}
        self.backend.before_delivery = lambda number: self._step(self.deliveries[number])
        rings = Rings(self.backend, self.buckets, self.states["mask"], VOCAB)
        assert rings.linked == self.linked
        self.runner = Runner(
            self.backend,
            self.stream,
            [(bucket, self._capture(bucket, rings.frame(self.base, bucket, RESULTS))) for bucket in self.buckets],
            inputs=self.base,
            states=self.states,
            vocab_size=VOCAB,
            results=RESULTS,
            rings=rings,
        )
        assert all((self.array(state) == 0).all() for state in self.states.values())

    def _alloc(self, nbytes):
        return Buffer(self.backend.alloc(max(4, nbytes)), nbytes)

    def array(self, buffer, dtype=np.int32):
        return np.frombuffer(self.backend.view(buffer.address, buffer.nbytes), dtype)

    def _capture(self, bucket, frame):
        graphs = {}
        counts = InputLayout(bucket).buffers(self.base)["counts"].address
        parts = {"forward": (), "sample": ()}
        if frame:
            begin, end = frame.begin(), frame.end(self.activations, counts)
            self.deliveries[len(self.backend.actions) - 1] = bucket
            parts = {"forward": begin, "sample": end, "step": (*begin, *end)}
        for segment, launches in parts.items():
            self.backend.begin_capture(self.stream)
            for launch in launches:
                self.backend.enqueue(launch, self.stream)
            graphs[segment] = self.backend.end_capture(self.stream)
            self.graphs[graphs[segment].number] = bucket, segment
            self.captured.append(graphs[segment])

        def destroy():
            for graph in graphs.values():
                self.backend.destroy_graph(graph)

        return SimpleNamespace(
            activations=self.activations,
            launch=lambda s, stream: self.backend.launch_graph(graphs[s], stream),
            destroy=destroy,
        )

    def _on_graph(self, graph):
        bucket, segment = self.graphs[graph.number]
        self.segments.append(segment)
        if self.linked:
            return
        if segment == "forward":
            self.pending = bucket
            return
        assert self.pending == bucket
        self._step(bucket)

    def _step(self, bucket):
        self.used.append(bucket)
        inputs = {name: self.array(buffer) for name, buffer in InputLayout(bucket).buffers(self.base).items()}
        tokens, sequences, rows, updates = (
            int(inputs["counts"][c]) for c in (Count.TOKENS, Count.SEQUENCES, Count.ROWS, Count.UPDATES)
        )
        cu_q = inputs["cu_q"][: sequences + 1].tolist()
        plan = SimpleNamespace(
            sequences=[None] * sequences,
            row_slot=inputs["row_slot"][:sequences].tolist(),
            token_ids=inputs["token_ids"][:tokens].tolist(),
            cu_q=cu_q,
            logits_rows=inputs["logits_rows"][:rows].tolist(),
            sample_row=inputs["sample_row"][:rows].tolist(),
            scored=[
                Scored(place, -1, *given)
                for place, given in enumerate(inputs["scored"].reshape(-1, 2)[:rows].tolist())
                if given[0] >= 0
            ],
            updates=inputs["updates"][: 2 * updates].reshape(-1, 2).tolist(),
            clear_penalty=[],
            counted=[],
            max_query=int(np.diff(cu_q).max()),
        )
        # The scripted device keeps counts of its own; what the runner cleared in device memory is cleared there too.
        penalty = self.array(self.states["penalty"]).reshape(-1, VOCAB)
        plan.clear_penalty = [row for row in range(len(penalty)) if not penalty[row].any()]
        plan.counted = [
            _counted(row, penalty[row]) for row in range(len(penalty)) if set(penalty[row]) not in ({0}, {1})
        ]
        sampled = self.device.run(plan)
        penalty[[row for row, counts in self.device.penalty.items() if counts]] = (
            1  # a mark: the counts are the device's
        )
        self.array(self.activations["sampled"])[:rows] = sampled
        ids = self.array(self.activations["logprob_ids"]).reshape(-1, WIDE)
        values = self.array(self.activations["logprob_values"], np.float32).reshape(-1, WIDE)
        logits = self.array(self.activations["logits"], np.float32).reshape(-1, VOCAB)
        ids[:], values[:] = -1, 0
        given = {scored.place: scored for scored in plan.scored}
        for row, token in enumerate(sampled):
            if row in given:
                entry = alternatives(given[row].token, given[row].alternatives)
            else:
                slot = plan.row_slot[plan.sample_row[row]]
                entry = alternatives(token, self.device.slots[self.limits.layout.word(slot, Word.LOGPROBS)])
            ids[row, : len(entry.ids)] = entry.ids
            values[row, : len(entry.ids)] = entry.values
            logits[row] = np.arange(VOCAB) == token


def _counted(row, words):
    prompt = tuple(np.flatnonzero(words & PROMPT_BIT).tolist())
    return Counted(row, prompt, tuple(np.repeat(np.arange(VOCAB), words & (PROMPT_BIT - 1)).tolist()))


def items():
    return [
        request(
            str(i), range(i, 3 * i + 1), max_tokens=12 + i, seed=i, logprobs=i % 3 if i % 2 else None,
            presence_penalty=float(i % 2), logit_bias=((i, -5.0),), prompt_logprobs=i if i % 3 else None,
        )
        for i in range(9)
    ]  # fmt: skip


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_plans_say_is_what_the_device_runs(asynchronous, linked):
    machine = Machine(asynchronous=asynchronous, linked=linked)
    session = Session(engine=make_engine(runner=machine.runner))
    session.send(*items())
    session.run()
    for item in items():
        assert session.answer(item.id) == expected(item)
        for delta in session.deltas(item.id):
            for position, token in zip(delta.logprobs, delta.tokens, strict=False):
                want = alternatives(token, item.sampling.logprobs)
                assert [position.chosen.id, *(entry.id for entry in position.top)] == want.ids
                assert [position.chosen.logprob, *(entry.logprob for entry in position.top)] == want.values
    assert set(machine.used) == set(machine.buckets)
    assert machine.device.steps == session.results[-1].gauges.steps
    # A linked step is one graph, since nobody's mask comes between its segments.
    assert machine.segments == (["step"] if linked else ["forward", "sample"]) * machine.device.steps


def plans(count):
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request("a", max_tokens=9), seed=7, stop_ids=())
    return [scheduler.schedule() for _ in range(count)]


@pytest.mark.parametrize("linked", [False, True])
def test_penalty_rows_hold_what_was_found_in_the_prefix_cache(linked):
    limits = replace(LIMITS, prefix_cache=True)
    machine = Machine(asynchronous=True, linked=linked, limits=limits)
    session = Session(engine=make_engine(limits, machine.runner))
    prompt = [3, 3, 8, 0, 1, 2, 5, 9]
    first = request("a", prompt, max_tokens=30, ignore_eos=True, repetition_penalty=1.5)
    # The same again, while others make it give way: then it finds generated tokens too.
    others = [request(str(i), range(i, i + 30), max_tokens=30, ignore_eos=True, seed=i) for i in range(2)]
    again = request("b", prompt, max_tokens=30, ignore_eos=True, repetition_penalty=1.5)
    session.send(*others, first, again)
    session.run()
    assert session.results[-1].gauges.preemptions > 0
    assert session.deltas("b")[-1].cached_tokens >= 4
    for item in (first, *others, again):
        assert session.answer(item.id) == expected(item)


def test_the_smallest_bucket_that_fits_is_taken():
    machine = Machine()
    for plan in plans(3):
        machine.runner.collect(machine.runner.launch(plan))
    assert [bucket.tokens for bucket in machine.used] == [LIMITS.max_step_tokens, 1, 1]


def test_logits_are_those_of_the_last_step():
    machine = Machine(asynchronous=True)
    first, second, third = plans(3)
    ticket = machine.runner.launch(first)
    logits = machine.runner.read_logits(ticket)
    (token,) = machine.runner.collect(ticket).sampled
    assert np.array_equal(logits, (np.arange(VOCAB) == token)[None].astype(np.float32))
    ticket = machine.runner.launch(second)
    machine.runner.launch(third)
    with pytest.raises(EngineError, match="are gone"):
        machine.runner.read_logits(ticket)


def test_steps_are_collected_in_order_and_at_most_two_are_in_flight():
    machine = Machine(asynchronous=True)
    first, second, third = plans(3)
    tickets = deque(machine.runner.launch(plan) for plan in (first, second))
    with pytest.raises(EngineError, match="have not been collected"):
        machine.runner.launch(third)
    with pytest.raises(EngineError, match="oldest step in flight is 0"):
        machine.runner.collect(tickets[1])
    machine.runner.collect(tickets[0])
    with pytest.raises(EngineError, match="oldest step in flight is 1"):
        machine.runner.collect(tickets[0])
    tickets.append(machine.runner.launch(third))
    got = [machine.runner.collect(ticket).sampled[0] for ticket in list(tickets)[1:]]
    assert got == expected(request("a", max_tokens=9))[0][1:3]


def test_a_step_is_waited_for_once_whoever_asks_first(monkeypatch):
    machine = Machine(asynchronous=True)
    wait, waited = machine.backend.wait_event, []
    monkeypatch.setattr(machine.backend, "wait_event", lambda event: (waited.append(event), wait(event)))
    first, second = (machine.runner.launch(plan) for plan in plans(2))
    with pytest.raises(EngineError, match="oldest step in flight is 0"):
        machine.runner.wait(second)
    machine.runner.wait(first)
    machine.runner.wait(first)
    tokens = machine.runner.collect(first).sampled
    assert len(waited) == 1
    tokens += machine.runner.collect(second).sampled
    assert len(waited) == 2
    assert tokens == expected(request("a", max_tokens=9))[0][:2]


def test_steps_of_one_bucket_are_of_one_kind_unless_a_mask_comes_between():
    machine = Machine(asynchronous=True)
    first, second, third = plans(3)
    kinds = []
    for plan in (first, second, third, replace(third, masks=((0, Writes(1)),))):
        ticket = machine.runner.launch(plan)
        kinds.append(machine.runner.kind(ticket))
        machine.runner.collect(ticket)
    assert kinds == [machine.buckets[0], machine.buckets[1], machine.buckets[1], None]


def test_a_step_that_no_bucket_holds_is_an_error_that_says_so():
    machine = Machine()
    (plan,) = plans(1)
    with pytest.raises(EngineError, match="no captured step holds 99 tokens"):
        machine.runner.launch(replace(plan, token_ids=(1,) * 99, cu_q=(0, 99)))


def test_a_lost_device_is_not_hidden():
    machine = Machine(fail_at=3)
    first, second = plans(2)
    machine.runner.collect(machine.runner.launch(first))
    with pytest.raises(DeviceError) as caught:
        machine.runner.launch(second)
    assert caught.value.sticky
    assert caught.value.what == "step 1 cannot be launched, in the graphs for up to 1 tokens of 1 sequences"
    assert "submission 3 was told to" in caught.value.why
    assert "atlas kernels test" in caught.value.cure


def test_a_step_that_fails_on_the_device_is_named_when_it_is_collected(monkeypatch):
    machine = Machine(asynchronous=True)
    (plan,) = plans(1)
    ticket = machine.runner.launch(plan)

    def lost(event):
        raise DeviceError("Waiting for an event", "an illegal address", "restart the engine", sticky=True)

    monkeypatch.setattr(machine.backend, "wait_event", lost)
    with pytest.raises(DeviceError) as caught:
        machine.runner.collect(ticket)
    assert caught.value.sticky
    assert caught.value.what.startswith("step 0 has failed, in the graphs for up to ")
    assert caught.value.why == "Waiting for an event: an illegal address"
    assert caught.value.cure.startswith("restart the engine; ")


def test_only_what_is_live_is_copied():
    bucket = Bucket(8, 4, 4, 100, 8)
    layout = InputLayout(bucket)
    offsets = layout.offsets
    assert [*offsets] == ["counts", "cu_q", "row_slot", "logits_rows", "sample_row", "scored", "token_ids", "updates"]
    assert [*offsets.values()] == [0, 64, 128, 192, 256, 320, 384, 448]
    assert layout.nbytes == 448 + 800
    assert layout.buffers(4096)["token_ids"] == Buffer(4096 + 384, 32)
    writer = InputWriter(layout)
    block = np.full(layout.nbytes // 4, 99, np.int32)
    (plan,) = plans(1)
    assert writer.write(plan, block) == 448 + 8 * len(plan.updates)
    assert block[112 + 2 * len(plan.updates)] == 99


@pytest.mark.parametrize("linked", [False, True])
def test_closing_gives_everything_back(linked):
    machine = Machine(linked=linked)
    assert len(machine.captured) == (9 if linked else 6)
    machine.runner.close()
    assert not machine.backend._pinned
    for graph in machine.captured:
        with pytest.raises(DeviceError, match="was destroyed"):
            machine.backend.launch_graph(graph, machine.stream)


class Writes:
    """A restriction that writes one word."""

    def __init__(self, word):
        self.word = word

    def fill(self, row):
        row[:] = self.word


@pytest.mark.parametrize("linked", [False, True])
def test_masks_are_there_when_the_step_samples(linked):
    machine = Machine(asynchronous=True, linked=linked)
    seen = []
    step = machine._step

    def look(bucket):
        seen.append(machine.array(machine.states["mask"], np.uint32).reshape(LIMITS.layout.slots, -1).copy())
        step(bucket)

    machine._step = look
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request("a"), seed=1, stop_ids=())
    plan = scheduler.schedule()
    first = machine.runner.launch(replace(plan, masks=((2, Writes(5)), (0, Writes(0xFFFFFFFF)))))
    machine.runner.collect(first)
    scheduler.complete(plan, [1])
    machine.runner.collect(machine.runner.launch(replace(scheduler.schedule(), masks=((2, Writes(6)),))))
    assert [masks[:, 0].tolist() for masks in seen] == [[0xFFFFFFFF, 0, 5, 0], [0xFFFFFFFF, 0, 6, 0]]
    assert seen[0].shape[1] == -(-VOCAB // 32)


@pytest.mark.parametrize("linked", [False, True])
def test_a_late_step_stops_between_its_halves(linked):
    """FORWARD runs before the token is known that the mask depends on; SAMPLE finds the mask."""
    machine = Machine(asynchronous=True, linked=linked)
    scheduler = Scheduler(LIMITS)
    scheduler.submit(request("a", max_tokens=9), seed=1, stop_ids=())
    plan = scheduler.schedule()
    first = machine.runner.launch(plan)
    machine.backend.synchronize(machine.stream)
    restriction = Writes(0)
    ahead = replace(scheduler.schedule(), masks=((0, restriction),), late=True)
    second = machine.runner.launch(ahead)
    machine.backend.synchronize(machine.stream)
    assert len(machine.used) == 1
    assert machine.segments[-1] == "forward", "FORWARD has run, SAMPLE has not"
    (token,) = machine.runner.collect(first).sampled
    restriction.word = 1 << token
    machine.runner.sample(second)
    assert len(machine.runner.collect(second).sampled) == 1
    assert machine.array(machine.states["mask"], np.uint32)[0] == 1 << token
    assert len(machine.used) == 2

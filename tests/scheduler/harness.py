"""A scheduler over the scripted device."""

from collections import deque

from scripted import VOCAB, ScriptedDevice, oracle

from atlas_core.ops.step import SlotLayout
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

LIMITS = Limits(SlotLayout(3, (8,), 6), 4, (12,), VOCAB, 32, 5, 1, 100)


def request(name, prompt, **sampling):
    return Generate(name, tuple(prompt), SamplingParams(**sampling))


class Harness:
    """Schedules, runs and completes; ``ahead`` steps stay uncollected, as on a device that runs while the host plans."""

    def __init__(self, limits=LIMITS, ahead=0):
        self.scheduler = Scheduler(limits)
        self.device = ScriptedDevice(limits)
        self.ahead = ahead
        self.flight = deque()
        self.stops = {}
        self.out = {}
        self.scored = {}
        self.finished = {}

    def submit(self, item, seed=1, stop_ids=()):
        self.scheduler.submit(item, seed=seed, stop_ids=stop_ids)
        self.stops[item.id] = frozenset(stop_ids)
        self.out[item.id] = []

    def abort(self, name):
        self.scheduler.finish(self.scheduler.find(name))
        self.finished[name] = "abort"

    def step(self):
        plan = self.scheduler.schedule()
        assert plan is not None or self.flight or self.scheduler.idle, "the engine gives up where nothing can run"
        if plan is not None:
            self.check_writers(plan)
            for one in plan.scored:
                self.scored.setdefault(plan.sequences[one.row].id, []).append(one.token)
            self.flight.append((plan, self.device.run(plan)))
        if self.flight and (plan is None or len(self.flight) > self.ahead):
            self.collect()
        self.scheduler.check_integrity()
        return plan

    def check_writers(self, plan):
        """Pages that a step writes are in one block table only."""
        size = self.scheduler.limits.page_tokens
        holdings = [s.holding for s in (*self.scheduler._running, *self.scheduler._leaving)]
        for sequence, start, end in zip(plan.sequences, plan.cu_q, plan.cu_q[1:], strict=False):
            first = (sequence.computed - (end - start)) // size
            for group, pages in enumerate(sequence.holding.pages):
                written = pages[first : -(-sequence.computed // size)]
                assert sum(page in holding.pages[group] for holding in holdings for page in written) == len(written)

    def collect(self):
        for sequence, token in self.scheduler.complete(*self.flight.popleft()):
            self.out[sequence.id].append(token)
            if token in self.stops[sequence.id] or sequence.generated == sequence.max_new:
                self.finished[sequence.id] = "stop" if token in self.stops[sequence.id] else "length"
                self.scheduler.finish(sequence)

    def drain(self, most=3000):
        for _ in range(most):
            if self.scheduler.idle:
                assert not self.flight
                return
            self.step()
        raise AssertionError("no end in sight")


def assert_free(scheduler):
    assert scheduler.idle
    assert scheduler.tokens_used == 0
    scheduler.check_integrity()
    assert (scheduler._slots.used, scheduler._penalty_rows.used, scheduler._bias.used) == (0, 0, 0)


def pieces_beside_a_decode(limits, other):
    """Lengths of the pieces in which a prompt of 24 tokens is read while another one, of ``other``, decodes; both texts are what they are alone."""
    harness = Harness(limits)
    first, second = request("a", range(other), max_tokens=20), request("b", range(24), max_tokens=2)
    harness.submit(first)
    harness.step()
    harness.submit(second)
    lengths = []
    while not harness.out["b"]:
        before = harness.scheduler.find("b").computed
        harness.step()
        lengths.append(harness.scheduler.find("b").computed - before)
    harness.drain()
    assert [harness.out[item.id] for item in (first, second)] == [oracle(item, 1, (), 32) for item in (first, second)]
    return lengths

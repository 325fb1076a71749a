"""When the next step is launched: a simulated device tells how long it idles and whose arrival is in which step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.engine.pace import KNOWN, SAFETY, SHARE, SHORT, Load, Pace

HOST = 0.2e-3
"""Seconds from the decision to the launch."""


@dataclass
class Machine:
    """A device and the engine's loop around it, on one clock. ``host`` gives what planning and launching take."""

    host: object = lambda step: HOST
    now: float = 100.0
    pace: Pace = field(default_factory=Pace)
    running: list = field(default_factory=list)  # (load, end)
    busy_until: float = 0.0
    idle: list = field(default_factory=list)  # before each step
    slack: list = field(default_factory=list)  # how long before the end of its predecessor each was decided
    steps: int = 0

    def step(self, load, seconds):
        """What the loop does once: wait for the time to launch, launch, collect the step before."""
        at = self.pace.launch_at(self.now)
        if at is not None:
            assert at > self.now
            self.now = at
        self.slack.append(self.busy_until - self.now)
        self.now += self.host(self.steps)
        self.steps += 1
        begin = max(self.now, self.busy_until)
        self.idle.append(begin - self.busy_until if self.running else 0.0)
        self.busy_until = begin + seconds
        self.pace.launched(load, self.now)
        self.running.append(self.busy_until)
        if len(self.running) == 2:
            self.collect()

    def collect(self):
        asked, end = self.now, self.running.pop(0)
        self.now = max(asked, end) + 1e-6
        self.pace.collected(asked, self.now)


def decode(rows=32, attended=20000, kind="decode"):
    return Load(kind, rows, attended)


def test_steps_alike_are_launched_shortly_before_their_predecessor_ends():
    machine = Machine()
    for index in range(50):
        machine.step(decode(attended=20000 + 32 * index), 5e-3)
    assert machine.idle == [0.0] * 50
    assert min(machine.slack[1 : KNOWN + 1]) > 4.9e-3
    assert machine.slack[-1] == pytest.approx(SAFETY + SHARE * 5e-3 + HOST, rel=0.02)


@given(
    st.lists(st.floats(2 * HOST, 30e-3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.floats(1.0, 1.0 + SHARE)), min_size=1, max_size=80),
)
def test_the_device_never_waits_for_steps_that_take_about_as_long_as_those_before(lengths, order):
    machine = Machine()
    for index, jitter in order:
        kind = index % len(lengths)
        machine.step(decode(kind=str(kind)), lengths[kind] * jitter)
    assert machine.idle == [0.0] * len(order)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.lists(st.integers(1, 30000), min_size=1, max_size=64))
def test_whoever_leaves_takes_no_more_than_their_share_of_the_time_along(rows, contexts):
    """Time is what all share, what each token takes and what attention takes, in any proportion."""
    machine = Machine()
    for count in rows:
        attended = sum(contexts[i % len(contexts)] for i in range(count))
        machine.step(Load("decode", count, attended), 2.5e-3 + 20e-6 * count + 20e-9 * attended)
    assert machine.idle == [0.0] * len(rows)


def test_pieces_of_a_prompt_are_paced_and_the_next_prompt_does_not_find_the_device_waiting():
    machine = Machine()
    for _ in range(3):
        for index in range(20):
            end = 352 * (index + 1)
            machine.step(Load("mixed", 384, 352 * end + 20000), 10e-3 + 3e-9 * 352 * end)
        assert machine.slack[-1] < 6e-3  # of 17
        for _ in range(6):
            machine.step(decode(), 5e-3)
        assert machine.slack[-1] < 1e-3
    assert machine.idle == [0.0] * len(machine.idle)


@pytest.mark.parametrize("seconds", [SHORT * 0.9, 0.19e-3])
def test_short_steps_are_launched_at_once(seconds):
    machine = Machine(host=lambda step: 20e-6)
    for _ in range(30):
        machine.step(decode(), seconds)
    assert min(machine.slack[2:]) >= seconds - 30e-6


def test_nothing_is_put_off_without_a_kind_or_after_an_end_that_was_not_seen():
    machine = Machine()
    for _ in range(20):
        machine.step(decode(kind=None), 5e-3)
    assert min(machine.slack[1:]) > 4e-3
    machine = Machine()
    for _ in range(20):
        machine.step(decode(), 5e-3)
    machine.now += 20e-3  # something kept the host
    for expected in (0.0, 5e-3 - HOST):
        before = machine.now
        machine.step(decode(), 5e-3)
        assert machine.slack[-1] == pytest.approx(machine.busy_until - 5e-3 - before - expected, abs=25e-3)
        assert machine.pace.launch_at(machine.now) is None or machine.slack[-1] > 0


def test_a_slow_host_gets_the_time_that_it_needs():
    """Planning takes longer from step 30 on: one step is late, then none."""
    machine = Machine(host=lambda step: HOST if step < 30 else 1.5e-3)
    for _ in range(80):
        machine.step(decode(), 5e-3)
    late = [index for index, gap in enumerate(machine.idle) if gap > 0]
    assert late == [30]
    assert machine.slack[-1] < 3e-3


def test_the_first_step_alone_is_known_from_its_launch():
    pace = Pace()
    for begin in range(KNOWN):
        pace.launched(decode(), float(begin))
        assert pace.launch_at(begin + 1e-3) is None
        pace.collected(begin + 1e-3, begin + 10e-3)
    pace.launched(decode(), 50.0)
    assert pace.launch_at(50.0) == pytest.approx(50.0 + 10e-3 * (1 - SHARE) - SAFETY)
    assert pace.launch_at(50.0 + 9.8e-3) is None


def test_lateness_is_remembered_and_forgotten():
    """What waited for a step finds it over at once: the next are launched earlier, less and less so."""
    machine = Machine()
    for _ in range(20):
        machine.step(decode(), 5e-3)
    usual = machine.slack[-1]
    machine.step(decode(), 3e-3)  # shorter than all before: its successor is late
    machine.step(decode(), 5e-3)
    assert machine.idle[-1] > 0
    for _ in range(3):
        machine.step(decode(), 5e-3)
    assert machine.slack[-1] >= usual + SAFETY * 0.9
    for _ in range(300):
        machine.step(decode(), 5e-3)
    assert machine.slack[-1] == pytest.approx(usual, rel=0.01)
    assert sum(gap > 0 for gap in machine.idle) == 1

"""The loop beside an asynchronous device, on a clock that the test owns: what is launched when, and who is in it."""

from bisect import insort
from queue import Empty

import pytest
from msgspec.structs import replace
from scripted_engine import EOS, INFO, LIMITS, ScriptedRunner, ScriptedText, expected
from test_loop import request

from atlas_core.engine.loop import Closed, Engine
from atlas_core.engine.pace import SAFETY
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.vocab.errors import DeviceError
from atlas_core.vocab.messages import Abort, Drain

STEP, HOST = 5e-3, 0.2e-3
WIDE = replace(LIMITS, max_seq_len=64)


class World:
    """One clock for the device, the engine and those who send to it; an inbox, too."""

    def __init__(self):
        self.now = 10.0
        self.coming = []  # (time, order, message)

    def at(self, time, *messages):
        for message in messages:
            insort(self.coming, (time, len(self.coming), message))

    def get(self, block=True, timeout=None):
        """What has come, or comes within ``timeout``."""
        until = float("inf") if block and timeout is None else self.now + (timeout or 0.0)
        if self.coming and self.coming[0][0] <= until:
            time, _, message = self.coming.pop(0)
            self.now = max(self.now, time)
            return message
        assert until < float("inf"), "the engine waits for nobody"
        self.now = until
        raise Empty


class Device(ScriptedRunner):
    """Steps that take STEP seconds one after another, whatever the host does meanwhile; to launch one takes HOST."""

    def __init__(self, world, seconds=lambda plan: STEP, **options):
        super().__init__(WIDE, asynchronous=True, **options)
        self.world = world
        self.seconds = seconds
        self.ends = []
        self.launches = []  # (time, how long the device had nothing to do, ids)

    def launch(self, plan):
        self.world.now += HOST
        busy = self.ends[-1] if self.ends else self.world.now
        self.launches.append((self.world.now, self.world.now - busy, [s.id for s in plan.sequences]))
        self.ends.append(max(self.world.now, busy) + self.seconds(plan))
        return len(self.ends) - 1, super().launch(plan)

    def kind(self, ticket):
        return "step"

    def wait(self, ticket):
        self.world.now = max(self.world.now, self.ends[ticket[0]]) + 1e-5

    def collect(self, ticket):
        return super().collect(ticket[1])


def run(world, device, *, until=None):
    """Serve all that comes; the deltas, with the time at which each was told."""
    told = []

    def emit(result):
        told.extend((world.now, delta) for delta in result.deltas)

    engine = Engine(
        runner=device, scheduler=Scheduler(WIDE), text=ScriptedText(), eos=(EOS,), info=INFO, clock=lambda: world.now
    )
    if until is not None:
        world.at(until, Closed())
    engine.run(world, emit)
    return told, engine


def tokens(told, name):
    return [token for _, delta in told if delta.id == name for token in delta.tokens]


LONG = request("long", (1, 2), max_tokens=40, ignore_eos=True)


def test_an_arrival_is_in_the_next_step_and_the_device_never_waits():
    world = World()
    device = Device(world)
    late = request("late", (3, 4), max_tokens=3, ignore_eos=True)
    world.at(10.0, LONG)
    arrival = 10.0 + 20 * STEP + HOST + 0.6 * STEP  # in the 21st step
    world.at(arrival, late)
    told, engine = run(world, device, until=11.0)
    first = next(index for index, (_, _, ids) in enumerate(device.launches) if "late" in ids)
    assert first == 21
    assert device.launches[first][0] > arrival
    began = device.ends[first - 1]
    assert began - arrival < STEP / 2
    assert all(gap <= 0 for _, gap, _ in device.launches[1:])
    assert tokens(told, "late") == expected(late, WIDE)[0]
    assert tokens(told, "long") == expected(LONG, WIDE)[0]
    assert engine._scheduler.idle


def test_what_comes_too_late_for_a_step_is_in_the_one_behind():
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    arrival = 10.0 + 21 * STEP + HOST - SAFETY / 2
    world.at(arrival, request("late", (3, 4), max_tokens=3, ignore_eos=True))
    run(world, device, until=11.0)
    assert next(index for index, (_, _, ids) in enumerate(device.launches) if "late" in ids) == 22
    assert all(gap <= 0 for _, gap, _ in device.launches[1:])


def test_many_that_come_at_once_do_not_keep_the_device_waiting():
    """Each takes a millisecond to be looked at, as if it were long; those for whom there is no time come later."""
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    many = [request(str(index), (3, 4), max_tokens=1, ignore_eos=True) for index in range(12)]
    world.at(10.0 + 20.5 * STEP, *many)
    taken = World.get

    def slow(*args, **options):
        message = taken(world, *args, **options)
        if getattr(message, "id", "long") != "long":
            world.now += 1e-3
        return message

    world.get = slow
    told, _ = run(world, device, until=11.0)
    assert max(gap for _, gap, _ in device.launches[1:]) < 1e-3
    assert all(len(tokens(told, item.id)) == 1 for item in many)


def test_an_abort_meanwhile_is_heeded_before_the_next_step():
    world = World()
    device = Device(world)
    other = request("other", (5,), max_tokens=40, ignore_eos=True)
    world.at(10.0, LONG, other)
    world.at(10.0 + 20 * STEP + HOST + 0.3 * STEP, Abort("other"))
    told, _ = run(world, device, until=11.0)
    assert [delta.finish for _, delta in told if delta.id == "other"][-1] == "abort"
    assert max(index for index, (_, _, ids) in enumerate(device.launches) if "other" in ids) == 20
    assert tokens(told, "long") == expected(LONG, WIDE)[0]
    assert all(gap <= 0 for _, gap, _ in device.launches[1:])


def test_tokens_are_told_as_soon_as_their_step_has_ended():
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    told, _ = run(world, device, until=11.0)
    times = [time for time, delta in told if delta.tokens]
    assert max(time - end for time, end in zip(times, device.ends, strict=False)) < HOST + 2e-5


def test_a_drain_meanwhile_lets_the_running_end():
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    world.at(10.0 + 20.5 * STEP, Drain(5.0), request("new"))
    told, _ = run(world, device)
    assert tokens(told, "long") == expected(LONG, WIDE)[0]
    assert [delta.error.kind for _, delta in told if delta.id == "new"] == ["draining"]
    assert world.now < 10.0 + 42 * STEP


def test_a_drain_past_its_deadline_aborts_within_a_step():
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    world.at(10.0 + 20.5 * STEP, Drain(0.0))
    told, engine = run(world, device)
    assert told[-1][1].finish == "abort"
    assert told[-1][0] < 10.0 + 22.5 * STEP
    assert engine._scheduler.idle


def test_closing_meanwhile_ends_the_loop_at_once():
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    run(world, device, until=10.0 + 20.5 * STEP)
    assert world.now == 10.0 + 20.5 * STEP


@pytest.mark.parametrize(
    ("seconds", "alike"),
    [
        (lambda plan: 1e-3, "short"),
        (lambda plan: STEP * (1 + plan.sequences[0].computed % 7), "varying"),
    ],
)
def test_steps_whose_end_cannot_be_told_are_launched_at_once(seconds, alike):
    world = World()
    device = Device(world, seconds)
    world.at(10.0, LONG)
    run(world, device, until=12.0)
    slack = [-gap / seconds_of for (_, gap, _), seconds_of in zip(device.launches[1:], steps(device), strict=False)]
    assert min(slack[1:40]) > (0.7 if alike == "short" else 0.0)


def steps(device):
    """What each step took."""
    return [device.ends[0], *(end - before for before, end in zip(device.ends, device.ends[1:], strict=False))]


def test_a_device_that_is_lost_while_it_is_waited_for_ends_the_loop():
    world = World()
    device = Device(world)
    world.at(10.0, LONG)
    wait = device.wait

    def lost(ticket):
        if ticket[0] == 15:
            raise DeviceError("the device is lost", "the test said so", sticky=True)
        wait(ticket)

    device.wait = lost
    with pytest.raises(DeviceError, match="lost"):
        run(world, device, until=11.0)

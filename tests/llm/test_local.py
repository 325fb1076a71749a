"""The engine's thread: whatever happens to it, nobody waits for ever."""

import gc
from queue import SimpleQueue

import pytest

from atlas_core.engine.loop import Closed
from atlas_core.llm.local import LocalEngine
from atlas_core.vocab.errors import DeviceError, EngineError, RequestError
from atlas_core.vocab.messages import Abort, Delta, Failure, Gauges, Generate, Ready, StepResult
from atlas_core.vocab.sampling import SamplingParams

INFO = Ready(16, 2, 10, "test")


class Scripted:
    """An engine that answers each request by what ``script`` gives for its id: deltas, or an exception to die of."""

    info = INFO

    def __init__(self, script):
        self.script = script
        self.seen = []
        self.released = SimpleQueue()

    def run(self, inbox, emit):
        while not isinstance(message := inbox.get(), Closed):
            self.seen.append(message)
            if isinstance(message, Generate):
                answer = self.script(message.id)
                if isinstance(answer, Exception):
                    raise answer
                emit(StepResult(tuple(answer), Gauges()))

    def start(self, window=8):
        return LocalEngine(lambda: (self, lambda: self.released.put(True)), lambda info: window)


def request(name):
    return Generate(name, (1,), SamplingParams())


def answer(name):
    return [Delta(name, text="a"), Delta(name, text="b", finish="stop")]


def test_deltas_of_all_requests_and_no_more_at_once_than_the_window():
    engine = Scripted(answer)
    local = engine.start(window=1)
    order = [
        (delta.id, delta.text, len([m for m in engine.seen if isinstance(m, Generate)]))
        for delta in local.run([request("x"), request("y"), request("z")])
    ]
    assert order == [("x", "a", 1), ("x", "b", 1), ("y", "a", 2), ("y", "b", 2), ("z", "a", 3), ("z", "b", 3)]
    local.close()
    assert engine.released.get(timeout=5)
    local.close()


def test_what_cannot_be_built_is_raised_where_it_was_asked_for():
    def build():
        raise DeviceError("no device", "none", "buy one")

    with pytest.raises(DeviceError, match="no device") as caught:
        LocalEngine(build, lambda info: 1)
    assert caught.value.cure == "buy one"


def test_a_defect_while_building_keeps_its_cause():
    with pytest.raises(EngineError, match="failed unexpectedly") as caught:
        LocalEngine(lambda: 1 / 0, lambda info: 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_engine_that_dies_fails_what_runs_and_what_comes_later():
    engine = Scripted(lambda name: answer(name) if name == "fine" else DeviceError("it burns", sticky=True))
    local = engine.start()
    assert [delta.text for delta in local.run([request("fine")])] == ["a", "b"]
    with pytest.raises(DeviceError, match="it burns"):
        list(local.run([request("a"), request("b")]))
    with pytest.raises(DeviceError, match="it burns"):
        list(local.run([request("c")]))
    assert engine.released.get(timeout=5)
    local.close()


def test_a_refused_request_is_raised_and_the_others_are_given_up():
    refused = Delta("bad", finish="error", error=Failure("RequestError", "too long", kind="invalid"))
    engine = Scripted(lambda name: [refused] if name == "bad" else [Delta(name, text="a")])
    local = engine.start()
    with pytest.raises(RequestError, match="too long"):
        list(local.run([request("good"), request("bad")]))
    local.close()
    assert Abort("good") in engine.seen
    assert Abort("bad") not in engine.seen


def test_leaving_early_aborts():
    engine = Scripted(lambda name: [Delta(name, text="a")])
    local = engine.start()
    stream = local.run([request("x"), request("y")])
    next(stream)
    stream.close()
    local.close()
    assert {message.id for message in engine.seen if isinstance(message, Abort)} == {"x", "y"}


def test_an_engine_that_was_closed_takes_nothing():
    local = Scripted(answer).start()
    local.close()
    with pytest.raises(EngineError, match="closed"):
        list(local.run([request("x")]))


def test_an_engine_may_be_collected_on_its_own_thread():
    def script(name):
        gc.collect()
        return answer(name)

    engine = Scripted(script)
    circle = {"local": engine.start()}
    circle["self"] = circle
    thread, shared = circle["local"]._thread, circle["local"]._shared
    gc.disable()
    try:
        del circle
        shared.submit(request("x"), SimpleQueue())
        thread.join(10)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert engine.released.get(timeout=5)

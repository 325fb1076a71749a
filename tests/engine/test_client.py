import asyncio
import contextlib
import json
import logging
import os
import signal
import time

import pytest
from scripted_engine import build, expected, make_engine

from atlas_core.engine import loop
from atlas_core.engine.client import InProcessClient, ProcessClient
from atlas_core.engine.wire import VERSION
from atlas_core.vocab.errors import BudgetError, EngineError, PluginError, RequestError
from atlas_core.vocab.messages import Gauges, Generate, Progress
from atlas_core.vocab.sampling import SamplingParams


def request(name, prompt=(1, 2, 3), **sampling):
    return Generate(name, tuple(prompt), SamplingParams(**{"seed": 7, **sampling}))


LONG = {"max_tokens": 60, "ignore_eos": True}


def in_process(**options):
    capacity = options.pop("stream_capacity", 1024)
    return InProcessClient(build, json.dumps(options).encode(), stream_capacity=capacity)


def child(**options):
    capacity = options.pop("stream_capacity", 1024)
    return ProcessClient("scripted_engine:build", json.dumps(options).encode(), stream_capacity=capacity)


@contextlib.asynccontextmanager
async def started(client):
    await client.start(lambda progress: None)
    try:
        yield client
    finally:
        await client.close()


async def answer(client, item):
    deltas = [delta async for delta in client.generate(item)]
    last = deltas[-1]
    return [t for d in deltas for t in d.tokens], "".join(d.text for d in deltas), last.finish, last.stop


async def to_the_end(stream, received):
    async for delta in stream:
        received.append(delta)


async def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


@pytest.fixture(params=[in_process, child])
def make(request, child_path):
    return request.param


def test_start_generate_and_close(make):
    async def scenario():
        client = make(asynchronous=True)
        seen = []
        assert client.state == "loading"
        with pytest.raises(EngineError) as caught:
            _ = client.info
        assert caught.value.state == "loading"
        await client.start(seen.append)
        assert seen == [Progress("weights", 1, 2), Progress("weights", 2, 2, "done")]
        assert (client.state, client.info.max_seq_len, client.info.fingerprint) == ("ready", 64, "scripted")
        items = [request(str(i), range(i + 1), max_tokens=10, seed=i) for i in range(6)]
        assert await asyncio.gather(*(answer(client, item) for item in items)) == [expected(item) for item in items]
        await until(lambda: client.gauges.running == 0)
        assert client.gauges.kv_tokens_used == 0
        await client.close()
        await client.close()
        assert client.state == "gone"
        with pytest.raises(EngineError) as caught:
            await answer(client, request("late"))
        assert caught.value.state == "gone"

    asyncio.run(scenario())


def test_a_refused_request_raises_what_the_engine_said(make):
    async def scenario():
        async with started(make()) as client:
            with pytest.raises(RequestError) as caught:
                await answer(client, request("a", range(64), seed=1))
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(EngineError, match="cannot be encoded"):
                await answer(client, request("a", seed=2**64))
            assert await answer(client, request("a", max_tokens=3)) == expected(request("a", max_tokens=3))

    asyncio.run(scenario())


def test_a_start_that_fails_raises_the_engines_own_error(make):
    async def scenario():
        client = make(broken=True)
        with pytest.raises(BudgetError, match="does not fit") as caught:
            await client.start(lambda progress: None)
        assert caught.value.cure == "buy memory"
        assert client.state == "faulted"

    asyncio.run(scenario())


def test_a_failing_progress_callback_fails_the_start():
    async def scenario():
        def report(progress):
            raise ValueError("no terminal")

        client = in_process()
        with pytest.raises(EngineError, match="unexpectedly") as caught:
            await client.start(report)
        assert caught.value.why == "ValueError: no terminal"

    asyncio.run(scenario())


def test_a_builder_that_does_not_exist(child_path):
    async def scenario():
        client = ProcessClient("scripted_engine:nothing", b"")
        with pytest.raises(PluginError, match="scripted_engine:nothing"):
            await client.start(lambda progress: None)

    asyncio.run(scenario())


def test_an_engine_with_other_plugins_is_refused(child_path, monkeypatch):
    async def scenario():
        monkeypatch.setattr("atlas_core.engine.client.installed", lambda: (("atlas-core", "2026.12.0 another"),))
        client = child()
        with pytest.raises(EngineError, match="do not have the same plugins") as caught:
            await client.start(lambda progress: None)
        assert "atlas-core is 2026.12.0 another here and " in caught.value.why
        assert client.state == "faulted"
        assert client.process.returncode is not None

    asyncio.run(scenario())


def test_a_socket_that_cannot_be_made_is_explained(tmp_path, monkeypatch):
    async def scenario():
        folder = tmp_path / ("x" * 120)
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(EngineError, match="cannot be made") as caught:
            await child().start(lambda progress: None)
        assert "TMPDIR" in caught.value.cure
        assert list(folder.iterdir()) == []

    asyncio.run(scenario())


def test_a_cancelled_start_leaves_no_process(child_path):
    async def scenario():
        client = child(load=60)
        task = asyncio.create_task(client.start(lambda progress: None))
        await until(lambda: client.process is not None, 20)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.process.returncode is not None

    asyncio.run(scenario())


def test_a_killed_engine_fails_every_stream_at_once(child_path):
    async def scenario():
        client = child(delay=0.02)
        await client.start(lambda progress: None)
        streams = [client.generate(request(str(i), **LONG)) for i in range(7)]
        for stream in streams[:4]:
            await anext(stream)

        async def fate(stream):
            with pytest.raises(EngineError) as caught:
                await to_the_end(stream, [])
            return caught.value

        fates = [asyncio.create_task(fate(stream)) for stream in streams]
        await asyncio.sleep(0)
        os.kill(client.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        found = await asyncio.gather(*fates)
        assert time.monotonic() - killed < 1.0
        assert {error.state for error in found} == {"faulted"}
        assert "killed by signal 9" in found[0].why
        assert client.state == "faulted"
        assert client.gauges == Gauges()
        with pytest.raises(EngineError) as caught:
            await answer(client, request("late"))
        assert caught.value.state == "faulted"
        await client.close()
        assert client.state == "faulted"

    asyncio.run(scenario())


def test_an_engine_killed_with_a_request_unread_is_told_like_any_other(child_path):
    async def scenario():
        client = child()
        await client.start(lambda progress: None)
        os.kill(client.process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(answer(client, request("a")))
        await asyncio.sleep(0.05)
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="has failed") as caught:
            await waiting
        assert "killed by signal 9" in caught.value.why
        await client.close()

    asyncio.run(scenario())


def test_an_engine_killed_while_it_drains_is_a_fault(child_path):
    async def scenario():
        client = child(delay=0.05)
        await client.start(lambda progress: None)
        running = asyncio.create_task(answer(client, request("a", **LONG)))
        await until(lambda: client.gauges.running == 1)
        draining = asyncio.create_task(client.drain(30.0))
        await until(lambda: client.state == "draining")
        os.kill(client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="has failed"):
            await running
        await draining
        assert client.state == "faulted"
        await client.close()

    asyncio.run(scenario())


def test_a_lost_device_faults_every_stream(make, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)

    async def scenario():
        client = make(fail_at=4)
        await client.start(lambda progress: None)
        results = await asyncio.gather(
            *(answer(client, request(str(i), **LONG)) for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, EngineError) and "the device is lost" in result.why for result in results)
        assert client.state == "faulted"
        assert (client.fault.what, client.fault.why) == ("the device is lost", "the test said so")
        await client.close()

    asyncio.run(scenario())
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("atlas.engine", "ERROR")
    assert record.getMessage() == "the engine has failed: the device is lost; the test said so"


def test_a_defect_leaves_its_traceback_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)

    async def scenario():
        client = in_process(fail_at=2, defect=True)
        await client.start(lambda progress: None)
        with pytest.raises(EngineError, match="has failed") as caught:
            await answer(client, request("a", **LONG))
        assert "ZeroDivisionError: the test said so" in caught.value.why
        await client.close()

    asyncio.run(scenario())
    traces = [record.exc_text or str(record.exc_info) for record in caplog.records if record.exc_info]
    assert len(traces) == 1
    assert "ZeroDivisionError" in traces[0]


def test_a_cancelled_consumer_frees_its_slot(make):
    async def scenario():
        async with started(make(delay=0.01)) as client:
            tasks = [asyncio.create_task(answer(client, request(str(i), **LONG))) for i in range(8)]
            await until(lambda: client.gauges.running == 4 and client.gauges.waiting == 4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(
                lambda: client.gauges.running == client.gauges.waiting == client.gauges.kv_tokens_used == 0, 1.0
            )
            await until(lambda: not client._leaving)
            assert await answer(client, request("0", max_tokens=3)) == expected(request("0", max_tokens=3))

    asyncio.run(scenario())


def test_a_closed_stream_frees_its_slot_and_an_id_is_busy_until_then():
    async def scenario():
        async with started(in_process(delay=0.01)) as client:
            stream = client.generate(request("a", **LONG))
            await anext(stream)
            with pytest.raises(RequestError, match="already running"):
                await anext(client.generate(request("a")))
            await stream.aclose()
            with pytest.raises(RequestError, match="already running"):
                await anext(client.generate(request("a")))
            await until(lambda: not client._leaving)
            assert await answer(client, request("a", max_tokens=2)) == expected(request("a", max_tokens=2))

    asyncio.run(scenario())


def test_an_abort_ends_the_stream():
    async def scenario():
        async with started(in_process(delay=0.01)) as client:
            stream = client.generate(request("a", **LONG))
            first = await anext(stream)
            await client.abort("a")
            rest = [delta async for delta in stream]
            assert rest[-1].finish == "abort"
            tokens = [token for delta in (first, *rest) for token in delta.tokens]
            assert tokens == expected(request("a", **LONG))[0][: len(tokens)]

    asyncio.run(scenario())


def test_a_slow_consumer_is_aborted_and_slows_nobody():
    async def scenario():
        async with started(in_process(stream_capacity=5, delay=0.002)) as client:
            slow = client.generate(request("slow", **LONG))
            await anext(slow)
            assert await answer(client, request("quick", **LONG)) == expected(request("quick", **LONG))
            await until(lambda: client.gauges.running == 0)
            received = []
            with pytest.raises(RequestError, match="not read in time") as caught:
                await to_the_end(slow, received)
            assert len(received) == 5
            assert caught.value.code == "slow_client"

    asyncio.run(scenario())


def test_a_drain_finishes_what_runs_and_ends_the_engine(make):
    async def scenario():
        client = make(delay=0.005)
        await client.start(lambda progress: None)
        item = request("a", **LONG)
        running = asyncio.create_task(answer(client, item))
        await until(lambda: client.gauges.running == 1)
        draining = asyncio.create_task(client.drain(10.0))
        await until(lambda: client.state == "draining")
        with pytest.raises(EngineError) as caught:
            await answer(client, request("late"))
        assert caught.value.state == "draining"
        assert await running == expected(item)
        await draining
        assert client.state == "gone"
        await client.close()

    asyncio.run(scenario())


def test_a_drain_past_its_deadline_aborts():
    async def scenario():
        async with started(in_process(delay=0.05)) as client:
            running = asyncio.create_task(answer(client, request("a", **LONG)))
            await until(lambda: client.gauges.running == 1)
            await client.drain(0.1)
            assert (await running)[2] == "abort"

    asyncio.run(scenario())


def test_the_engine_ends_with_its_api_process(child_path):
    async def scenario():
        client = child(delay=0.05)
        await client.start(lambda progress: None)
        stream = client.generate(request("a", **LONG))
        await anext(stream)
        client._connection.transport.abort()
        assert await asyncio.wait_for(client.process.wait(), 5.0) == 0
        await client.close()

    asyncio.run(scenario())


def test_the_engine_ends_with_its_api_process_even_while_it_loads(child_path):
    async def scenario():
        client = child(load=60)
        loading = asyncio.Event()
        task = asyncio.create_task(client.start(lambda progress: loading.set()))
        await asyncio.wait_for(loading.wait(), 20)
        client._connection.transport.abort()
        assert await asyncio.wait_for(client.process.wait(), 1.5) == 0
        with pytest.raises(EngineError, match="ended unexpectedly"):
            await task

    asyncio.run(scenario())


def test_another_version_is_refused(monkeypatch):
    async def scenario():
        client = in_process()
        monkeypatch.setattr("atlas_core.engine.client.VERSION", VERSION + 1)
        with pytest.raises(EngineError, match="different releases|version") as caught:
            await client.start(lambda progress: None)
        assert "different releases" in caught.value.why

    asyncio.run(scenario())


def test_a_request_in_flight_when_the_client_closes_fails():
    async def scenario():
        client = in_process(delay=0.01)
        await client.start(lambda progress: None)
        running = asyncio.create_task(answer(client, request("a", **LONG)))
        await until(lambda: client.gauges.running == 1)
        await client.close()
        with pytest.raises(EngineError, match="shut down") as caught:
            await running
        assert caught.value.state == "gone"

    asyncio.run(scenario())


def test_closing_the_client_closes_the_device():
    engines = []

    def remembering(settings, report):
        engines.append(make_engine())
        return engines[-1]

    async def scenario():
        async with started(InProcessClient(remembering)):
            assert not engines[0]._runner.closed

    asyncio.run(scenario())
    assert engines[0]._runner.closed


def test_a_sink_takes_what_it_wants_and_the_order_stays():
    async def scenario():
        async with started(in_process()) as client:
            item = request("a", max_tokens=40, ignore_eos=True)
            seen, yielded = [], []

            def sink(delta):
                taken = delta.completion_tokens % 5 != 0
                if taken:
                    seen.append(delta)
                return taken

            async for delta in client.generate(item, sink):
                seen.append(delta)
                yielded.append(delta.completion_tokens)
                if delta.completion_tokens == 20:
                    await asyncio.sleep(0.05)  # what comes meanwhile waits, and is not offered
            assert [delta.completion_tokens for delta in seen] == list(range(1, 41))
            assert "".join(delta.text for delta in seen) == expected(item)[1]
            assert yielded[-1] == 40  # the last one is never offered
            assert len(yielded) < 40

    asyncio.run(scenario())


def test_a_sink_that_fails_fails_its_stream_alone():
    async def scenario():
        async with started(in_process()) as client:

            def sink(delta):
                raise ValueError("no")

            other = asyncio.create_task(answer(client, request("b", max_tokens=30)))
            with pytest.raises(ValueError, match="no"):
                await to_the_end(client.generate(request("a", **LONG), sink), [])
            assert await other == expected(request("b", max_tokens=30))
            await until(lambda: client.gauges.running == 0)

    asyncio.run(scenario())


def test_a_step_of_many_rows_comes_in_pieces(monkeypatch):
    async def scenario():
        sizes = []
        monkeypatch.setattr(loop, "PIECE", 1)
        monkeypatch.setattr(loop, "GROWTH", 2)
        async with started(in_process()) as client:
            take = client._connection._take
            monkeypatch.setattr(
                client._connection, "_take", lambda m: (sizes.append(len(getattr(m, "deltas", ()))), take(m))
            )
            items = [request(str(n), seed=n, **LONG) for n in range(4)]
            assert await asyncio.gather(*(answer(client, item) for item in items)) == [expected(item) for item in items]
        assert [1, 2, 1] in [sizes[at : at + 3] for at in range(len(sizes))]

    asyncio.run(scenario())

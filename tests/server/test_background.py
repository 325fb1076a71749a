"""Responses in the background: they go on without their client, can be watched, and be cancelled."""

import asyncio
import json

import httpx
import openai
import pytest

from atlas_core.server.rates import Rates
from atlas_core.server.responses.jobs import EventLog, Job, Jobs
from atlas_core.server.store.memory import MemoryStore
from atlas_core.server.store.port import Record, StoreLimits


@pytest.fixture(scope="module")
def server(serve_module, kit):
    return serve_module(kit.engine(delay=0.003))


@pytest.fixture(scope="module")
def slow(serve_module, kit):
    """One whose responses take a second: whatever is asked meanwhile is asked in time."""
    return serve_module(kit.engine(delay=0.04))


def post(server, **body):
    return server.http.post("/v1/responses", json={"input": "hi", "background": True} | body)


def get(server, name):
    return server.http.get(f"/v1/responses/{name}").json()


def ended(server, kit, name):
    kit.until(lambda: get(server, name)["status"] not in ("queued", "in_progress"))
    return get(server, name)


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_asked_for_until_it_is_done(server, kit):
    first = post(server, metadata={"a": "b"}).json()
    assert (first["status"], first["background"], first["output"], first["usage"]) == ("queued", True, [], None)
    done = ended(server, kit, first["id"])
    assert (done["status"], done["metadata"]) == ("completed", {"a": "b"})
    assert done["output"][0]["content"][0]["text"] == kit.answer
    again = post(server, background=False, input="more", previous_response_id=first["id"])
    assert again.json()["usage"]["input_tokens"] > done["usage"]["input_tokens"]


def test_one_that_is_not_done_cannot_be_gone_on_from(slow, kit):
    first = post(slow).json()
    kit.until(lambda: get(slow, first["id"])["status"] == "in_progress")
    error = post(slow, previous_response_id=first["id"]).json()["error"]
    assert (error["param"], "it has no answer" in error["message"]) == ("previous_response_id", True)
    slow.http.post(f"/v1/responses/{first['id']}/cancel")


def test_cancelled(slow, kit):
    first = post(slow).json()
    kit.until(lambda: slow.engine.running)
    cancelled = slow.http.post(f"/v1/responses/{first['id']}/cancel").json()
    assert (cancelled["status"], cancelled["usage"]) == ("cancelled", None)
    assert slow.engine.aborted[-1].startswith(first["id"])
    assert get(slow, first["id"])["status"] == "cancelled"
    assert slow.http.post(f"/v1/responses/{first['id']}/cancel").json() == cancelled
    kit.until(lambda: slow.app.gate.inside == 0)
    other = post(slow, background=False).json()
    error = slow.http.post(f"/v1/responses/{other['id']}/cancel")
    assert (error.status_code, error.json()["error"]["code"]) == (400, "response_not_cancellable")
    assert slow.http.post("/v1/responses/resp_none/cancel").status_code == 404


def test_deleted_while_it_is_made(slow, kit):
    first = post(slow).json()
    assert slow.http.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    kit.until(lambda: slow.app.gate.inside == 0)
    assert slow.http.get(f"/v1/responses/{first['id']}").status_code == 404


def test_it_goes_on_without_its_client_and_can_be_watched_again(slow, kit):
    with slow.http.stream("POST", "/v1/responses", json={"input": "hi", "background": True, "stream": True}) as answer:
        seen = []
        for line in answer.iter_lines():
            seen += events(line)
            if len(seen) == 6:
                break
    opened = [(event["type"], event["response"]["status"]) for event in seen[:3]]
    assert opened == [
        ("response.created", "queued"), ("response.queued", "queued"), ("response.in_progress", "in_progress")
    ]  # fmt: skip
    name = seen[0]["response"]["id"]
    assert get(slow, name)["status"] == "in_progress"
    rest = events(slow.http.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": 5}).text)
    assert [event["sequence_number"] for event in seen + rest] == list(range(6 + len(rest)))
    assert rest[-1]["type"] == "response.completed"
    assert rest[-1]["response"] == get(slow, name)
    text = "".join(event["delta"] for event in seen + rest if event["type"] == "response.output_text.delta")
    assert text == kit.answer
    # The events stay for a while, all of them.
    assert events(slow.http.get(f"/v1/responses/{name}", params={"stream": "true"}).text) == seen + rest
    for value in ("x", "-5", "1.5"):
        error = slow.http.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": value})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "starting_after")


def test_the_sdk_watches(server, kit):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as sdk:
        seen = []
        for event in sdk.responses.create(model="tiny", input="hi", background=True, stream=True):
            seen.append(event)
            if len(seen) == 8:
                break
        name = seen[0].response.id
        rest = list(sdk.responses.retrieve(name, stream=True, starting_after=7))
        assert [event.sequence_number for event in rest] == list(range(8, 8 + len(rest)))
        with sdk.responses.stream(response_id=name) as again:
            assert again.get_final_response().output_text == kit.answer
        assert sdk.responses.cancel(name).status == "completed"


def test_events_that_nobody_kept(server, kit):
    name = post(server).json()["id"]
    error = server.http.get(f"/v1/responses/{name}", params={"stream": "true"})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "stream")
    ended(server, kit, name)


def test_queries_that_say_nothing(server):
    name = post(server, background=False).json()["id"]
    error = server.http.get(f"/v1/responses/{name}", params={"stream": "maybe"})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "stream")


def test_room_is_counted(serve, kit):
    server = serve(kit.engine(slots=2, prefill=1.0), max_queue=1)
    names = [post(server).json()["id"] for _ in range(3)]
    full = post(server)
    assert (full.status_code, "retry-after" in full.headers) == (429, True)
    for name in names:
        assert ended(server, kit, name)["status"] == "completed"
    assert server.app.gate.inside == 0


def test_one_that_fails(serve, kit, caplog):
    server = serve(kit.engine(answer=lambda request: kit.deltas(request)[:3]))
    done = ended(server, kit, post(server).json()["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "server_error")

    def broken(request):
        raise ValueError("a secret of the inside")

    server.engine.answer = broken
    done = ended(server, kit, post(server, stream=False).json()["id"])
    assert (done["status"], "secret" in json.dumps(done), "its log has the details" in done["error"]["message"]) == (
        "failed",
        False,
        True,
    )
    assert any(record.exc_info for record in caplog.records)


def test_draining_waits_for_it(serve, kit):
    server = serve(kit.engine(delay=0.03))
    name = post(server).json()["id"]
    kit.until(lambda: server.engine.running)
    loop = server.server._loop
    loop.call_soon_threadsafe(server.server._on_signal, 15)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert server.engine.aborted == []
    store = server.app._store
    record = asyncio.run(store.load("nobody", "response", name))
    assert record.body["status"] == "completed"


def test_one_that_outlasts_the_draining_has_failed(serve, kit):
    server = serve(kit.engine(delay=0.05), drain_timeout=0.2)
    name = post(server).json()["id"]
    kit.until(lambda: server.engine.running)
    server.server._loop.call_soon_threadsafe(server.server._on_signal, 15)
    server.thread.join(10)
    record = asyncio.run(server.app._store.load("nobody", "response", name))
    assert (record.body["status"], record.body["error"]["code"]) == ("failed", "server_error")


def test_one_that_a_server_left_behind_has_failed(serve, kit):
    store = MemoryStore(StoreLimits(), lambda: 0.0)
    first = serve(kit.engine())
    made = post(first, background=False).json()
    left = Record(
        "resp_left", "response", 1, made | {"id": "resp_left", "status": "in_progress", "background": True}, ()
    )
    asyncio.run(store.save("nobody", left))
    server = serve(kit.engine(), store=store)
    found = get(server, "resp_left")
    assert (found["status"], "stopped while" in found["error"]["message"]) == ("failed", True)


async def _log():
    log = EventLog()
    log.add(b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n")
    reader = log.read(1)
    assert await anext(reader) == b"event: b\ndata: 2\n\n"
    log.add(b"data: 3\n\n")
    log.end()
    assert [part async for part in reader] == [b"data: 3\n\n"]
    assert [part async for part in log.read(9)] == []


async def _jobs():
    jobs = Jobs()

    async def work():
        pass

    for number in range(70):
        job = Job({"id": str(number)}, EventLog() if number else None)
        await jobs.start("me", job, work())
    await asyncio.sleep(0)
    kept = [number for number in range(70) if jobs.find("me", str(number))]
    assert kept == list(range(6, 70))
    assert jobs.find("you", "69") is None
    await jobs.close()


def test_logs_and_jobs():
    asyncio.run(_log())
    asyncio.run(_jobs())


def test_pings_while_nothing_comes(serve, kit):
    server = serve(kit.engine(prefill=0.4), ping_interval=0.1)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=10) as http:
        text = http.post("/v1/responses", json={"input": "hi", "background": True, "stream": True}).text
        assert text.count(": ping") >= 2
        assert events(text)[-1]["type"] == "response.completed"
        text = http.post("/v1/responses", json={"input": "hi", "stream": True}).text
        assert text.index("response.created") < text.index(": ping") < text.index("response.completed")


def test_its_tokens_are_charged_for(serve, kit):
    server = serve(kit.engine(), rates=Rates(tokens=60))
    name = post(server, max_output_tokens=8).json()["id"]
    done = ended(server, kit, name)["usage"]["total_tokens"]
    kit.until(lambda: server.app.gate.inside == 0)
    left = int(server.http.get(f"/v1/responses/{name}").headers["x-ratelimit-remaining-tokens"])
    assert 60 - done <= left <= 60 - done + 5

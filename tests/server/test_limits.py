import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from atlas_core.server.limits import Gate
from atlas_core.vocab.errors import RequestError


@pytest.mark.parametrize("stream", [False, True])
def test_a_burst_is_cut_at_the_limit(serve, kit, stream):
    server = serve(kit.engine(slots=2, delay=0.02), max_queue=2)
    with ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(lambda _: server.chat(stream=stream, max_tokens=20), range(10)))
    assert sorted(response.status_code for response in responses) == [200] * 4 + [429] * 6
    for response in responses:
        if response.status_code == 429:
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["content-type"] == "application/json"
            assert response.elapsed.total_seconds() < 1
    assert server.chat(max_tokens=2).status_code == 200
    assert len(server.engine.requests) == 5


def test_choices_and_prompts_count_each(serve, kit):
    server = serve(kit.engine(slots=2), max_queue=2)
    assert server.chat(n=4).status_code == 200
    assert server.complete(prompt=["a", "b"], n=2).status_code == 200
    response = server.complete(prompt=["a", "b", "c"], n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_sequences")


def test_the_gate():
    async def check():
        gate = Gate()
        await gate.emptied()
        with gate.enter(2, 3), gate.enter(1, 3):
            assert gate.inside == 3
            with pytest.raises(RequestError) as caught, gate.enter(1, 3):
                pass
            assert caught.value.kind == "overloaded"
            waiter = asyncio.create_task(gate.emptied())
            await asyncio.sleep(0)
            assert not waiter.done()
        await waiter
        with pytest.raises(ZeroDivisionError), gate.enter(1, 1):
            1 / 0  # noqa: B018
        assert gate.inside == 0

    asyncio.run(check())

"""An engine's process that begins before anybody has orders for it."""

import asyncio

import pytest
from test_client import answer, request, started

from atlas_core.engine.child import EngineProcess
from atlas_core.engine.client import ProcessClient
from atlas_core.vocab.errors import BudgetError, EngineError


def test_it_prepares_while_it_waits_and_then_serves(child_path):
    async def scenario(process):
        async with started(ProcessClient("nobody:loads this", b"{}", process=process)) as client:
            assert client.process is process
            assert (await answer(client, request("a")))[0]

    with EngineProcess("scripted_engine:prepare") as process:
        assert process.returncode is None
        asyncio.run(scenario(process))
    assert process.returncode is not None


def test_what_fails_in_its_preparation_is_told_like_any_failure_to_start(child_path):
    async def scenario(process):
        with pytest.raises(BudgetError, match="no room to prepare") as caught:
            await ProcessClient("scripted_engine:build", b"{}", process=process).start(lambda progress: None)
        assert caught.value.cure == "make room"

    with EngineProcess("scripted_engine:unprepared") as process:
        asyncio.run(scenario(process))


def test_one_that_ends_at_once_is_not_waited_for(child_path):
    async def scenario(process):
        with pytest.raises(EngineError, match="did not start|unexpectedly") as caught:
            await ProcessClient("scripted_engine:build", b"{}", process=process).start(lambda progress: None)
        assert "exited with status" in caught.value.why

    with EngineProcess("scripted_engine:INFO") as process:  # no function: an error of another kind
        asyncio.run(scenario(process))


def test_one_that_was_never_asked_is_ended(child_path):
    with EngineProcess("scripted_engine:prepare") as process:
        pass
    assert process.returncode == -9


@pytest.mark.parametrize("orders", [b'{"delay": 0.0}', b'{"delay": 0.001}'], ids=["as foreseen", "others"])
def test_it_begins_with_what_it_will_be_told_and_obeys_what_it_is_told(child_path, orders):
    async def scenario(process):
        client, phases = ProcessClient("nobody:loads this", orders, process=process), []
        await client.start(phases.append)
        assert (await answer(client, request("a")))[0]
        await client.close()
        return len(phases)

    with EngineProcess("scripted_engine:prepare", b'{"delay": 0.0}') as process:
        reports = asyncio.run(scenario(process))
    assert reports == (2 if orders == b'{"delay": 0.0}' else 4)


def test_a_failure_that_came_early_is_told_when_somebody_listens(child_path):
    async def scenario(process):
        await asyncio.sleep(1.0)  # it has failed by now, and waits
        with pytest.raises(BudgetError, match="it does not fit"):
            await ProcessClient("nobody:loads this", b'{"broken": true}', process=process).start(lambda progress: None)

    with EngineProcess("scripted_engine:prepare", b'{"broken": true}') as process:
        asyncio.run(scenario(process))

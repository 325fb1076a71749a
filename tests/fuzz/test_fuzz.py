"""The fuzzers themselves: a short run, and that they notice a defect."""

import asyncio
import json
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import translation
from mutation import cut, mutated
from seeds import SEEDS

from atlas_core.server import translate
from atlas_core.server.app import Application
from atlas_core.server.options import ServerOptions


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(translation, "PER_APPLICATION", 40)


def test_a_short_run(capsys):
    asyncio.run(translation.main(1.5, 7))
    assert "seed 7" in capsys.readouterr().out


def test_a_defect_is_noticed(monkeypatch):
    def broken(ids, vocab_size, field):
        raise ZeroDivisionError

    monkeypatch.setattr(translate, "check_ids", broken)
    with pytest.raises(AssertionError, match=r"(?s)POST /.*→ 500.*ZeroDivisionError"):
        asyncio.run(translation.main(20, 7))


def test_every_endpoint_that_reads_a_body_has_a_good_request():
    async def bring_up(on_progress):
        raise NotImplementedError

    table = Application(bring_up, ServerOptions(), translation.kit.Recorder()).table
    plain = {each.path for each in table.operations if each.body is not None and "{" not in each.path}
    assert {path for path, _ in SEEDS} == plain


def test_good_requests_are_good():
    async def check():
        random = Random(1)
        dialects = translation.known_dialects()
        async with translation.running(random, {name: dialects[name] for name in ("hermes", "think")}) as app:
            for path, body in SEEDS:
                status, said = await translation.ask(app, path, json.dumps(body).encode())
                assert status in (200, 201) or "no_embeddings" in said.decode(), (path, status, said)

    asyncio.run(check())


def test_mutations_follow_the_seed_and_leave_the_original_alone():
    original = json.dumps(SEEDS[0][1])
    first = [mutated(SEEDS[0][1], Random(number), [1]) for number in range(50)]
    assert first == [mutated(SEEDS[0][1], Random(number), [1]) for number in range(50)]
    assert json.dumps(SEEDS[0][1]) == original
    assert sum(one != SEEDS[0][1] for one in first) > 40
    assert "".join(cut("abcdef", Random(3))) == "abcdef"

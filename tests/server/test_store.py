"""The store: the same in memory and in a file, within its limits, for each owner alone, and there after a restart."""

import asyncio
import re
import sqlite3
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_core.server.store.database import Database
from atlas_core.server.store.memory import MemoryStore
from atlas_core.server.store.opening import open_store
from atlas_core.server.store.paging import page
from atlas_core.server.store.port import Record, StoreLimits
from atlas_core.server.store.sqlite import SqliteStore
from atlas_core.vocab.errors import AtlasError, RequestError, UsageError


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def item(name, text="text"):
    return {"id": name, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def response(name, *items, body=None):
    return Record(name, "response", 7, body or {"id": name}, items, max(0, len(items) - 1))


def talk(name, *items):
    return Record(name, "conversation", 7, {"metadata": {}}, items)


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """Make stores; ``make(limits)``."""
    clock = Clock()
    made = []

    def start(**limits):
        place = "memory" if request.param == "memory" else str(tmp_path / f"{len(made)}.db")
        store = open_store(place, StoreLimits(**limits), clock)
        made.append(store)
        return store

    start.clock = clock
    yield start
    for store in made:
        asyncio.run(store.close())


def do(work):
    return asyncio.run(work)


def test_what_is_kept_comes_back(make):
    store = make()
    one = response("r", item("a", "ü\u2028"), item("b"), body={"id": "r", "x": [1, 2.5, None, "é"]})
    do(store.save("me", one))
    assert do(store.load("me", "response", "r")) == one
    assert do(store.load("me", "conversation", "r")) is None
    assert do(store.load("you", "response", "r")) is None
    do(store.save("me", response("r", item("b", "other"))))
    assert do(store.load("me", "response", "r")).items == (item("b", "other"),)
    assert (do(store.item("me", "b")), do(store.item("me", "a")), do(store.item("you", "b"))) == (
        item("b", "other"),
        None,
        None,
    )
    assert (do(store.delete("you", "response", "r")), do(store.delete("me", "response", "r"))) == (False, True)
    assert (do(store.load("me", "response", "r")), do(store.item("me", "b"))) == (None, None)
    assert do(store.delete("me", "response", "r")) is False


def test_conversations_change(make):
    store = make()
    do(store.save("me", talk("c", item("a"))))
    assert do(store.append("me", "c", [item("b"), item("d", "text")]))
    assert do(store.load("me", "conversation", "c")).items == (item("a"), item("b"), item("d"))
    assert (do(store.remove("me", "c", "b")), do(store.remove("me", "c", "b"))) == (True, False)
    assert do(store.append("me", "c", [item("e")]))
    assert [each["id"] for each in do(store.load("me", "conversation", "c")).items] == ["a", "d", "e"]
    assert do(store.rewrite("me", "c", {"metadata": {"x": "y"}}))
    assert do(store.load("me", "conversation", "c")).body == {"metadata": {"x": "y"}}
    do(store.save("me", response("r", item("a"))))
    for owner, name in (("you", "c"), ("me", "r"), ("me", "none")):
        assert not do(store.append(owner, name, [item("x")]))
        assert not do(store.remove(owner, name, "a"))
        assert not do(store.rewrite(owner, name, {}))


def test_the_oldest_go_first(make):
    store = make(entries=3)
    for name in "abc":
        do(store.save("me", talk(name)))
    do(store.append("me", "a", [item("x")]))
    do(store.save("you", talk("d")))
    assert [name for name in "abc" if do(store.load("me", "conversation", name))] == ["a", "c"]


def test_bytes_are_bounded(make):
    store = make(size=4000)
    for number in range(20):
        do(store.save("me", response(str(number), item("a", str(number) * 300))))
    left = [number for number in range(20) if do(store.load("me", "response", str(number)))]
    assert left == list(range(20))[-len(left) :]
    assert 2 <= len(left) <= 13
    with pytest.raises(RequestError, match="cannot be kept") as caught:
        do(store.save("me", response("big", item("a", "x" * 5000))))
    assert caught.value.kind == "too_large"
    do(store.save("me", talk("c")))
    with pytest.raises(RequestError, match="cannot be kept"):
        do(store.append("me", "c", [item("a", "x" * 5000)]))
    assert do(store.load("me", "conversation", "c")).items == ()


def test_nothing_is_kept_for_ever(make):
    store = make(retention=100.0)
    do(store.save("me", response("r", item("a"))))
    do(store.save("me", talk("c")))
    make.clock.now += 99
    assert do(store.load("me", "response", "r"))
    assert do(store.append("me", "c", [item("b")]))
    make.clock.now += 2
    assert (do(store.load("me", "response", "r")), do(store.item("me", "a"))) == (None, None)
    assert do(store.load("me", "conversation", "c")).items == (item("b"),)


NAMES = st.sampled_from("abcd")
OWNERS = st.sampled_from(["me", "you"])
ITEMS = st.lists(st.builds(item, NAMES, st.sampled_from(["x", "y"])), max_size=4, unique_by=lambda one: one["id"])
STEPS = st.one_of(
    st.tuples(st.just("save"), OWNERS, st.builds(lambda name, items: response(name, *items), NAMES, ITEMS)),
    st.tuples(st.just("save"), OWNERS, st.builds(lambda name, items: talk(name, *items), NAMES, ITEMS)),
    st.tuples(st.just("load"), OWNERS, st.sampled_from(["response", "conversation"]), NAMES),
    st.tuples(st.just("delete"), OWNERS, st.sampled_from(["response", "conversation"]), NAMES),
    st.tuples(st.just("append"), OWNERS, NAMES, ITEMS),
    st.tuples(st.just("remove"), OWNERS, NAMES, NAMES),
    st.tuples(st.just("rewrite"), OWNERS, NAMES, st.dictionaries(NAMES, NAMES, max_size=1)),
)


@settings(deadline=None, max_examples=25)
@given(steps=st.lists(STEPS, max_size=30))
def test_memory_and_file_are_the_same(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("store") / "s.db"
    limits, clock = StoreLimits(entries=5), Clock()

    async def play():
        memory, file = MemoryStore(limits, clock), SqliteStore(Database(path, limits, clock))
        for name, *arguments in steps:
            clock.now += 1
            assert await getattr(memory, name)(*arguments) == await getattr(file, name)(*arguments)
        for owner in ("me", "you"):
            for name in "abcd":
                for kind in ("response", "conversation"):
                    assert await memory.load(owner, kind, name) == await file.load(owner, kind, name)
                assert await memory.item(owner, name) == await file.item(owner, name)
        await file.close()

    asyncio.run(play())
    again = Database(path, limits, clock)
    size = again.size
    assert again._measured() == size
    again.close()


def test_what_is_too_old_leaves_the_file(tmp_path):
    clock = Clock()
    base = Database(tmp_path / "s.db", StoreLimits(retention=100.0), clock)
    base.save("me", response("r", item("a", "a secret of mine")))
    clock.now += 101
    assert base.load("me", "response", "other") is None
    assert base.size == 0
    base.close()
    assert b"a secret of mine" not in (tmp_path / "s.db").read_bytes()


def test_what_histories_have_in_common_is_kept_once(tmp_path):
    base = Database(tmp_path / "s.db", StoreLimits(), Clock())
    history = tuple(item(f"i{number}", "x" * 1000 + str(number)) for number in range(50))
    for turn in range(1, 50):
        # As a client sends it that keeps the history itself: with the same words, and ids of its own.
        base.save("me", response(f"r{turn}", *({**one, "id": f"{one['id']}-{turn}"} for one in history[:turn])))
    assert base.size < 60_000 + 64 * 50 * 50
    assert base.load("me", "response", "r49").items[-1] == {**history[48], "id": "i48-49"}
    for turn in range(1, 50):
        assert base.delete("me", "response", f"r{turn}")
    assert base.size == base._measured() == 0
    base.close()


def test_a_file_outlives_its_server(serve, tmp_path):
    path = str(tmp_path / "kept.db")
    first = serve(store=open_store(path, StoreLimits()))
    with openai.OpenAI(base_url=f"{first.url}/v1", api_key="k", max_retries=0) as sdk:
        made = sdk.responses.create(model="tiny", input="one")
        conversation = sdk.conversations.create(metadata={"a": "b"})
        sdk.responses.create(model="tiny", input="two", conversation=conversation.id)
    first.stop()
    second = serve(store=open_store(path, StoreLimits()))
    with openai.OpenAI(base_url=f"{second.url}/v1", api_key="k", max_retries=0) as sdk:
        assert sdk.responses.retrieve(made.id).model_dump() == made.model_dump()
        assert len(sdk.conversations.items.list(conversation.id).data) == 2
        after = sdk.responses.create(model="tiny", input="three", previous_response_id=made.id)
        assert after.usage.input_tokens > made.usage.input_tokens
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["text", "cut", "other", "newer", "folder", "nowhere"])
def test_a_file_that_cannot_be_used_is_told_at_the_start(tmp_path, kind):
    path = tmp_path / "s.db"
    why = {"text": "not a database", "cut": "malformed|damaged", "other": "something else", "newer": "another version"}
    if kind == "text":
        path.write_text("this is a diary " * 100)
    elif kind == "folder":
        path.mkdir()
    elif kind == "nowhere":
        path = tmp_path / "no" / "s.db"
    elif kind == "other":
        with sqlite3.connect(path) as base:
            base.execute("CREATE TABLE t (x)")
        base.close()
    else:
        base = Database(path, StoreLimits(), Clock())
        for number in range(50):
            base.save("me", response(str(number), item("a", "x" * 2000 + str(number))))
        base.close()
        if kind == "cut":
            data = bytearray(path.read_bytes())
            data[8192 : len(data) // 2] = b"\xff" * (len(data) // 2 - 8192)
            path.write_bytes(data)
        else:
            with sqlite3.connect(path) as other:
                other.execute("PRAGMA user_version = 99")
            other.close()
    with pytest.raises(UsageError, match="cannot be used as a store") as caught:
        open_store(str(path), StoreLimits())
    assert str(path) in caught.value.what
    assert re.search(why.get(kind, "."), caught.value.why), caught.value.why


def test_one_server_has_it(tmp_path):
    base = Database(tmp_path / "s.db", StoreLimits(), Clock())
    with pytest.raises(UsageError) as caught:
        Database(tmp_path / "s.db", StoreLimits(), Clock())
    assert caught.value.why == "another server uses it"
    base.close()


def test_a_file_that_fails_later_is_told_to_the_client(tmp_path):
    store = open_store(str(tmp_path / "s.db"), StoreLimits())
    store._database.close()
    with pytest.raises(AtlasError, match="the store has failed"):
        do(store.load("me", "response", "r"))
    store._closed = True
    store._thread.shutdown()


def test_a_slow_disk_holds_nobody_up(serve, tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "s.db"), StoreLimits())
    server = serve(store=store)
    pause, asked = threading.Event(), threading.Event()
    real = store._database.save

    def slow(*arguments):
        asked.set()
        assert pause.wait(10)
        real(*arguments)

    monkeypatch.setattr(store._database, "save", slow)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(server.http.post, "/v1/responses", json={"input": "hi"})
        assert asked.wait(5)
        assert server.complete().status_code == 200
        assert not waiting.done()
        pause.set()
        assert waiting.result().json()["status"] == "completed"


@settings(deadline=None)
@given(count=st.integers(0, 30), limit=st.integers(1, 9), order=st.sampled_from(["asc", "desc"]))
def test_pages_joined_are_the_list(count, limit, order):
    items = [item(str(number)) for number in range(count)]
    seen, query, more = [], {"limit": str(limit), "order": order}, True
    while more:
        found = page(items, query)
        seen += found["data"]
        assert len(found["data"]) == limit or not found["has_more"]
        assert (found["first_id"], found["last_id"]) == (
            (found["data"][0]["id"], found["data"][-1]["id"]) if found["data"] else (None, None)
        )
        more = found["has_more"]
        query["after"] = found["last_id"]
    assert seen == (items if order == "asc" else items[::-1])

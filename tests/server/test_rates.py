import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_core.server.auth import RateGuard
from atlas_core.server.boundary import Record, record_of
from atlas_core.server.rates import MOST_CLIENTS, RateLimiter, Rates
from atlas_core.server.routes import RouteTable


def test_a_burst_then_the_rate():
    limiter = RateLimiter(Rates(requests=60, burst=5))
    assert [limiter.admit("a", 0).wait for _ in range(6)] == [0, 0, 0, 0, 0, 1.0]
    assert limiter.admit("a", 0.25).wait == 0.75
    assert limiter.admit("b", 0).wait == 0
    assert limiter.admit("a", 1.0).wait == 0
    assert limiter.admit("a", 1.5).wait == 0.5
    assert [limiter.admit("a", 100.0).wait for _ in range(6)][-2:] == [0, 1.0]


def test_tokens_are_made_up_for():
    limiter = RateLimiter(Rates(tokens=600))
    assert limiter.admit("a", 0).wait == 0
    limiter.charge("a", 700, 0)
    verdict = limiter.admit("a", 0)
    assert (verdict.limit, verdict.wait) == ("tokens", pytest.approx(10.1))
    assert limiter.admit("a", 10.0).wait == pytest.approx(0.1)
    assert limiter.admit("a", 10.1).wait == 0


def test_headers():
    limiter = RateLimiter(Rates(requests=120, tokens=600))
    assert limiter.admit("a", 0).headers == {
        "x-ratelimit-limit-requests": "120", "x-ratelimit-remaining-requests": "119", "x-ratelimit-reset-requests": "0.500s",
        "x-ratelimit-limit-tokens": "600", "x-ratelimit-remaining-tokens": "600", "x-ratelimit-reset-tokens": "0.000s",
    }  # fmt: skip
    limiter.charge("a", 900, 0)
    assert limiter.admit("a", 0).headers["x-ratelimit-remaining-tokens"] == "0"


def test_what_is_refused_is_not_counted():
    limiter = RateLimiter(Rates(requests=1))
    limiter.admit("a", 0)
    waits = [limiter.admit("a", at).wait for at in (0, 10, 20)]
    assert waits == pytest.approx([60, 50, 40])


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=40))
def test_waiting_as_told_is_enough_and_the_rate_holds(story):
    limiter = RateLimiter(Rates(requests=30, tokens=1000, burst=20))
    now, spent = 0.0, 0
    for admitted, (pause, tokens) in enumerate(story, 1):
        now += pause
        wait = limiter.admit("a", now).wait
        if wait:
            now += wait + 1e-6
            assert limiter.admit("a", now).wait == 0
        limiter.charge("a", tokens, now)
        # What the buckets held, what has flowed in, and the one answer that may overdraw.
        assert admitted <= 10 + now * 30 / 60 + 1e-3
        assert spent <= 1000 * 20 / 60 + now * 1000 / 60 + 1e-3
        spent += tokens


def test_the_table_is_bounded_and_keeps_who_came_last():
    limiter = RateLimiter(Rates(requests=1))
    limiter.admit("first", 0)
    for number in range(MOST_CLIENTS - 1):
        limiter.admit(str(number), 0)
    assert limiter.admit("first", 0).wait > 0
    limiter.admit("one more", 0)
    assert len(limiter) == MOST_CLIENTS
    assert limiter.admit("first", 0).wait > 0
    assert limiter.admit("0", 0).wait == 0


def test_over_http(serve, kit):
    server = serve(
        kit.engine(), api_keys=("a", "b"), rates=Rates(requests=2, tokens=60)
    )  # fmt: skip

    def ask(key, path="/v1/chat/completions"):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        return server.http.post(path, json=body, headers={"x-api-key": key})

    first = ask("a")
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert ask("a").headers["x-ratelimit-remaining-tokens"] == str(60 - 25)
    refused = ask("a")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
    assert int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert ask("b").status_code == 200
    assert server.http.get("/metrics", headers={"x-api-key": "a"}).status_code == 200
    assert server.http.get("/health").status_code == 200
    assert ask("a", "/nowhere").status_code == 429
    assert len(server.engine.requests) == 3


def test_without_keys_an_address_is_a_client(serve):
    server = serve(rates=Rates(requests=1))
    assert server.http.get("/v1/models").status_code == 200
    spoofed = server.http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.9"})
    assert spoofed.status_code == 429


def test_without_limits_there_are_no_headers(serve):
    assert not [name for name in serve().chat().headers if name.startswith("x-ratelimit")]


def test_tokens_are_counted_before_the_client_has_its_answer():
    limiter, left = RateLimiter(Rates(tokens=60)), []

    async def app(scope, receive, send):
        record = record_of(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        record.prompt_tokens = 20
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        record.completion_tokens = 5
        await send({"type": "http.response.body", "body": b"b"})

    async def send(message):
        left.append(limiter.admit("here", 0).headers["x-ratelimit-remaining-tokens"])

    guard = RateGuard(app, limiter, RouteTable([]), lambda: 0.0)
    record = Record(id="1", method="POST", path="/v1/completions")
    scope = {"type": "http", "path": record.path, "client": ("here", 1), "state": {"record": record}}
    asyncio.run(guard(scope, None, send))
    assert left == ["60", "60", "35"]
    assert limiter.admit("here", 0).headers["x-ratelimit-remaining-tokens"] == "35"

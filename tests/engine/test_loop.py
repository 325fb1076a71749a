from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted import VOCAB
from scripted_engine import EOS, LIMITS, ScriptedRunner, alternatives, expected, make_engine

from atlas_core.engine.loop import Closed
from atlas_core.ops.step import SlotLayout
from atlas_core.vocab.errors import DeviceError, EngineError
from atlas_core.vocab.messages import Abort, Drain, Gauges, Generate, Hello, StepResult
from atlas_core.vocab.sampling import SamplingParams


def request(name, prompt=(1, 2, 3), **sampling):
    return Generate(name, tuple(prompt), SamplingParams(**{"seed": 7, **sampling}))


class Session:
    """Runs an engine on the test's own thread; ``script`` gives messages to send after the n-th result."""

    def __init__(self, *, script=(), most=5000, engine=None, **options):
        self.engine = engine or make_engine(**options)
        self.inbox = SimpleQueue()
        self.results = []
        self.script = dict(script)
        self.wanted = set()
        self.most = most

    def send(self, *messages):
        for message in messages:
            if isinstance(message, Generate):
                self.wanted.add(message.id)
            self.inbox.put(message)

    def emit(self, result):
        assert isinstance(result, StepResult)
        self.results.append(result)
        assert len(self.results) < self.most
        self.send(*self.script.pop(len(self.results), ()))
        self.wanted -= {delta.id for delta in result.deltas if delta.finish}
        gauges = result.gauges
        if not self.wanted and not self.script and gauges.running == gauges.waiting == gauges.kv_tokens_used == 0:
            self.inbox.put(Closed())

    def run(self):
        self.engine.run(self.inbox, self.emit)
        return self

    def deltas(self, name):
        return [delta for result in self.results for delta in result.deltas if delta.id == name]

    def answer(self, name):
        """(tokens, text, finish, stop), after checking what holds for every stream."""
        deltas = self.deltas(name)
        assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1]
        tokens = [token for delta in deltas for token in delta.tokens]
        assert last.completion_tokens == len(tokens)
        return tokens, "".join(d.text for d in deltas), last.finish, last.stop


def sampling_params(limits):
    words = st.sampled_from(["a", "ab", "ba", "stop", "the ", "é", "😀", "\ufffd", "st", "o", "."])
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(-(2**63), 2**64 - 1),
        max_tokens=st.none() | st.integers(1, 20),
        min_tokens=st.integers(0, 6),
        stop=st.lists(words, max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]) if limits.penalty_rows else st.just(0.0),
        include_stop_in_output=st.booleans(),
        ignore_eos=st.booleans(),
        skip_special_tokens=st.booleans(),
        logprobs=st.sampled_from([None, None, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )


@st.composite
def sessions(draw):
    limits = replace(
        LIMITS,
        layout=SlotLayout(draw(st.integers(1, 4)), (16,), 6),
        pages=(draw(st.integers(16, 28)),),
        max_prefill_tokens=draw(st.integers(1, 12)),
        max_mixed_tokens=draw(st.none() | st.integers(1, 12)),
        penalty_rows=draw(st.integers(0, 2)),
        prefix_cache=draw(st.booleans()),
    )
    if limits.prefix_cache and draw(st.booleans()):
        sizes = {
            "snapshots": draw(st.integers(1, 6)),
            "chunk": draw(st.integers(1, 4)),
            "least": draw(st.integers(1, 6)),
        }
        limits = replace(limits, **sizes)
    common = draw(st.lists(st.integers(0, VOCAB - 1), max_size=30))
    script = {}
    requests = []
    for index in range(draw(st.integers(1, 7))):
        prompt = common[: draw(st.integers(0, len(common)))]
        prompt += draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40 - len(prompt)))
        item = Generate(str(index), tuple(prompt), draw(sampling_params(limits)))
        requests.append(item)
        script.setdefault(draw(st.integers(0, 8)), []).append(item)
    for index in range(len(requests)):
        if draw(st.integers(0, 3)) == 0:
            script.setdefault(draw(st.integers(8, 30)), []).append(Abort(str(index)))
    return limits, draw(st.booleans()), requests, script


def check_scores(item, deltas):
    """Every prompt token but the first is told about once, in order, before anything is generated."""
    wanted = item.sampling.prompt_logprobs
    told = [[p.chosen.id, *(top.id for top in p.top)] for delta in deltas for p in delta.prompt_logprobs]
    whole = [] if wanted is None else [list(alternatives(token, wanted).ids) for token in item.prompt[1:]]
    assert told == whole[: len(told)]
    generated = [index for index, delta in enumerate(deltas) if delta.tokens]
    if generated:
        assert told == whole
        assert not any(delta.prompt_logprobs for delta in deltas[generated[0] + 1 :])


@given(sessions())
def test_every_answer_is_the_one_that_the_request_gets_alone(case):
    limits, asynchronous, requests, script = case
    # Script entries count results, which stop coming when there is nothing to do: send what is first at once.
    first = min(script)
    session = Session(limits=limits, asynchronous=asynchronous)
    for when, messages in script.items():
        if when == first:
            session.send(*messages)
        else:
            session.script[when - first] = messages
    aborts = {m.id for messages in script.values() for m in messages if isinstance(m, Abort)}
    keep_alive = request("keep", (5,), max_tokens=60, ignore_eos=True)
    session.send(keep_alive)
    session.run()
    for item in [*requests, keep_alive]:
        check_scores(item, session.deltas(item.id))
        want = expected(item, limits)
        tokens, text, finish, stop = session.answer(item.id)
        if finish == "abort":
            assert item.id in aborts
            assert tokens == want[0][: len(tokens)]
            assert want[1].startswith(text)
            continue
        assert (tokens, text, finish, stop) == want
        for delta in session.deltas(item.id):
            assert delta.prompt_tokens == len(item.prompt)
        ended_by_token = stop is not None and stop.isdecimal() and stop not in item.sampling.stop
        hidden = ended_by_token and not item.sampling.include_stop_in_output
        positions = [position for delta in session.deltas(item.id) for position in delta.logprobs]
        if item.sampling.logprobs is None:
            assert positions == []
            continue
        got = [[p.chosen.id, *(entry.id for entry in p.top)] for p in positions]
        shown = tokens[:-1] if hidden else tokens
        assert got == [list(alternatives(token, item.sampling.logprobs).ids) for token in shown]
    session.engine._scheduler.check_integrity()
    assert session.engine._scheduler.idle
    assert session.results[-1].gauges.kv_tokens_used == 0


def test_a_step_ahead_changes_nothing_but_the_number_of_steps():
    items = [request(str(i), range(i + 1), max_tokens=12, seed=i) for i in range(6)]
    plain, ahead = Session(), Session(asynchronous=True)
    for session in (plain, ahead):
        session.send(*items)
        session.run()
    for item in items:
        assert plain.answer(item.id) == ahead.answer(item.id) == expected(item)


def test_gauges_tell_the_load_after_each_step():
    session = Session()
    session.send(*(request(str(i), range(3), max_tokens=3, ignore_eos=True) for i in range(5)))
    session.run()
    gauges = [result.gauges for result in session.results]
    assert gauges[0] == Gauges(2, 3, 8, 96, 1, 0, 0, 0, 0)
    assert gauges[1] == Gauges(4, 1, 16, 96, 2, 0)
    assert gauges[-1] == Gauges(0, 0, 0, 96, len(gauges), 0)


def test_the_first_token_tells_when_the_first_step_began():
    session = Session()
    times = iter(range(1000))
    session.engine._clock = lambda: next(times)
    session.send(*(request(str(i), range(3), max_tokens=3, ignore_eos=True) for i in range(5)))
    session.run()
    started = [[delta.started for delta in session.deltas(str(i))] for i in range(5)]
    assert [rest for _, *rest in started] == [[None, None]] * 5
    firsts = [first for first, *_ in started]
    assert firsts == sorted(firsts)
    assert firsts[0] == firsts[1] < firsts[2] < firsts[4]  # two are begun at once, the last waits for a slot
    assert session.engine._unstarted == {}


@pytest.mark.parametrize(
    ("bad", "kind", "field"),
    [
        (request("bad", ()), "invalid", "prompt"),
        (request("bad", [1] * 64), "invalid", "prompt"),
        (request("bad", logit_bias=((VOCAB, 1.0),)), "invalid", "logit_bias"),
        (request("bad", stop=("",)), "invalid", "stop"),
    ],
)
def test_a_wrong_request_fails_alone(bad, kind, field):
    good = request("good", max_tokens=5)
    session = Session()
    session.send(bad, good)
    session.run()
    (delta,) = session.deltas("bad")
    assert (delta.finish, delta.error.type, delta.error.kind, delta.error.field) == (
        "error",
        "RequestError",
        kind,
        field,
    )
    assert delta.prompt_tokens == len(bad.prompt)
    assert session.answer("good") == expected(good)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_first_tokens_are_told_before_all_others_of_a_step(asynchronous):
    limits = replace(LIMITS, layout=SlotLayout(9, (16,), 6), pages=(60,), max_prefill_tokens=12)
    session = Session(limits=limits, asynchronous=asynchronous)
    session.send(*(request(str(i), range(2), max_tokens=20, ignore_eos=True, seed=i) for i in range(7)))
    session.script[12] = [request("late", range(3), max_tokens=4, ignore_eos=True)]
    session.run()
    order = [delta.id for result in session.results for delta in result.deltas if delta.tokens]
    at = order.index("late")
    others = [str(i) for i in range(7)]
    assert order[at - 7 : at] == order[at + 1 : at + 8] == others
    assert session.answer("late") == expected(request("late", range(3), max_tokens=4, ignore_eos=True), limits)


def test_a_token_without_a_meaning_fails_its_request_only():
    engine = make_engine()
    known = engine._text.token_bytes
    good = request("good", (4,), max_tokens=6, ignore_eos=True)
    tokens = expected(good)[0]
    bad = next(
        item for item in (request("bad", (i,), max_tokens=6, ignore_eos=True) for i in range(VOCAB))
        if not set(expected(item)[0][2:3]) & {*tokens, *expected(item)[0][:2]}
    )  # fmt: skip
    poison = expected(bad)[0][2]

    class Holes(type(engine._text)):
        def detokenizer(self, **options):
            from atlas_core.text.detokenize import Detokenizer
            from atlas_core.vocab.errors import RequestError

            def lookup(token):
                if token == poison:
                    raise RequestError(f"token {token} does not exist", code="invalid_token")
                return known(token)

            return Detokenizer(lookup)

    engine._text = Holes()
    session = Session(engine=engine)
    session.send(bad, good)
    session.run()
    assert [d.finish for d in session.deltas("bad")] == [None, None, "error"]
    assert session.deltas("bad")[-1].error.code == "invalid_token"
    assert session.answer("good") == expected(good)


def test_the_line_is_full_for_some_and_not_for_others():
    limits = replace(LIMITS, layout=SlotLayout(2, (16,), 6), max_waiting=2)
    session = Session(limits=limits)
    session.send(*(request(str(i), max_tokens=3) for i in range(10)))
    session.run()
    refused = [i for i in range(10) if session.answer(str(i))[2] == "error"]
    assert refused == [4, 5, 6, 7, 8, 9]
    assert {session.deltas(str(i))[0].error.kind for i in refused} == {"overloaded"}


def test_requests_without_a_seed_differ_from_one_another():
    session = Session()
    session.send(*(request(str(i), max_tokens=12, temperature=1.0, seed=None, ignore_eos=True) for i in range(3)))
    session.run()
    assert len({tuple(session.answer(str(i))[0]) for i in range(3)}) == 3


def test_a_drain_refuses_new_requests_finishes_the_old_and_ends():
    session = Session()
    old, new = request("old", max_tokens=8, ignore_eos=True), request("new")
    session.script = {2: [Drain(1e9), new]}
    session.send(old)
    session.run()
    assert session.answer("old") == expected(old)
    assert session.deltas("new")[0].error.kind == "draining"


def test_a_drain_past_its_deadline_aborts_what_is_left():
    session = Session(asynchronous=True)
    session.script = {3: [Drain(0.0)]}
    session.send(request("old", max_tokens=50, ignore_eos=True), *(request(f"w{i}", [1] * 60) for i in range(6)))
    session.run()
    assert session.answer("old")[2] == "abort"
    assert all(session.answer(f"w{i}")[2] == "abort" for i in range(6))
    assert session.engine._scheduler.idle


def test_an_unknown_abort_is_ignored():
    session = Session()
    session.send(Abort("nobody"), request("a", max_tokens=2))
    session.run()
    assert session.answer("a") == expected(request("a", max_tokens=2))


def test_a_lost_device_ends_the_loop():
    session = Session(runner=ScriptedRunner(LIMITS, fail_at=3))
    session.send(request("a", max_tokens=20, ignore_eos=True))
    with pytest.raises(DeviceError, match="lost") as caught:
        session.run()
    assert caught.value.sticky


def test_a_message_out_of_place_ends_the_loop():
    session = Session()
    session.send(Hello(1))
    with pytest.raises(EngineError, match="Hello came"):
        session.run()


def test_closing_wins_over_everything():
    session = Session()
    session.send(request("a"), Closed(), request("b"))
    session.run()
    assert session.results == []


def test_eos_is_the_models_unless_ignored():
    item = next(
        item for item in (request("a", (i,), max_tokens=40) for i in range(VOCAB)) if expected(item)[3] == str(EOS)
    )
    ignoring = replace(item, id="b", sampling=replace(item.sampling, ignore_eos=True))
    session = Session()
    session.send(item, ignoring)
    session.run()
    tokens, text, finish, stop = session.answer("a")
    assert (finish, stop, tokens[-1]) == ("stop", str(EOS), EOS)
    assert "</s>" not in text
    assert session.answer("b")[2] == "length"
    assert session.answer("b")[0][: len(tokens)] == tokens


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_is_only_scored_generates_nothing(asynchronous):
    session = Session(asynchronous=asynchronous)
    item = request("a", range(20), max_tokens=0, prompt_logprobs=1, logprobs=1)
    session.send(item, request("other", (9, 8), max_tokens=12, ignore_eos=True))
    session.run()
    assert session.answer("a") == ([], "", "length", None)
    check_scores(item, session.deltas("a"))
    assert sum(len(delta.prompt_logprobs) for delta in session.deltas("a")) == 19
    assert not any(delta.logprobs for delta in session.deltas("a"))
    other = request("other", (9, 8), max_tokens=12, ignore_eos=True)
    assert session.answer("other") == expected(other)


def test_scoring_leaves_rows_for_those_that_decode_or_start():
    """Prompts of others are through as soon as without it, and running ones get a token every step."""
    steps = {}
    for scoring in (None, 0):
        session = Session(limits=replace(LIMITS, layout=SlotLayout(4, (16,), 6), pages=(40,), max_prefill_tokens=12))
        session.send(request("a", (1,), max_tokens=30, ignore_eos=True))
        session.send(request("long", range(50), max_tokens=1, prompt_logprobs=scoring, ignore_eos=True))
        session.script[4] = [request("late", (3, 4, 5), max_tokens=4, ignore_eos=True)]
        session.run()
        shown = [[delta.id for delta in result.deltas if delta.tokens] for result in session.results]
        assert all("a" in ids for ids in shown[:30])
        steps[scoring] = min(index for index, ids in enumerate(shown) if "late" in ids)
    assert steps[0] <= steps[None] + 1

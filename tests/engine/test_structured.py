"""Answers of a given form, from a device that chooses at random among the tokens that it may."""

import json
import random
import threading
from itertools import count
from queue import SimpleQueue

import jsonschema
import numpy as np
import pytest
from test_loop import Session

from atlas_core.contracts.dialect import ReasoningSyntax
from atlas_core.engine import loop
from atlas_core.engine.grammar import Grammars
from atlas_core.engine.loop import Closed, Engine, StepOutput
from atlas_core.ops.step import SlotLayout, Word
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.text.detokenize import Detokenizer
from atlas_core.text.grammar import choice_grammar, json_grammar, regex_grammar, whole_grammar
from atlas_core.vocab.messages import Abort, Generate, Ready, Thinking
from atlas_core.vocab.sampling import SamplingParams

THINK = ReasoningSyntax("<think>", "</think>")
WORDS = [b'{"', b'"}', b'": ', b", ", b"</think>", b"<think>", b"true", b"\n\n", b">{", b'">', b"<control>", b"<eos>"]
VOCAB = 256 + len(WORDS) + 3
CONTROL, EOS = 256 + WORDS.index(b"<control>"), 256 + WORDS.index(b"<eos>")
CLOSERS = [*b'"}] \n,:0123', EOS]


class Bytes:
    """Every byte is a token, and some words; the last three ids of the model mean nothing."""

    special_ids = frozenset({CONTROL, EOS})
    vocab_size = 256 + len(WORDS)

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else (WORDS[token - 256] if token < self.vocab_size else b"")

    def encode(self, text, *, add_special=True, parse_special=True):
        return list(text.encode())

    def detokenizer(self, *, skip_special=True, shown=()):
        hidden = self.special_ids - set(shown) if skip_special else ()
        return Detokenizer(lambda token: b"" if token in hidden else self.token_bytes(token))


class RandomRunner:
    """Keeps the slots array as a device does, and looks at a mask only where the slot says so."""

    def __init__(self, limits, *, asynchronous, seed, closing=0.4):
        self.asynchronous = asynchronous
        self.slots = np.zeros(limits.layout.words, np.int32)
        self.masks = np.zeros((limits.layout.slots, -(-VOCAB // 32)), np.uint32)
        self.free = self.late = 0
        self._layout = limits.layout
        self._seed = seed
        self._closing = closing

    def launch(self, plan):
        for word, value in plan.updates:
            self.slots[word] = value
        ticket = plan, []
        # What is drawn depends on the request's seed and the token's place only, as on a device.
        self._draws = [
            (s.fields[Word.SEED_LOW], len(s.tokens) + s.pending)
            for s in (plan.sequences[row] for row in plan.sample_row)
        ]
        self.late += plan.late
        if not plan.late:
            self.sample(ticket)
        return ticket

    def sample(self, ticket):
        plan, sampled = ticket
        for slot, restriction in plan.masks:
            restriction.fill(self.masks[slot])
        for row, (seed, place) in zip(plan.sample_row, self._draws, strict=True):
            self._random = random.Random(f"{self._seed} {seed} {place}")
            sampled.append(self._choose(plan.row_slot[row]))

    def _choose(self, slot):
        if not self.slots[self._layout.word(slot, Word.MASK)]:
            self.free += 1
            return self._random.choice([*range(97, 123), 32, 10])
        bits = np.unpackbits(self.masks[slot].view(np.uint8), bitorder="little")[:VOCAB]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed
        if len(allowed) == VOCAB:  # it was not known in time that nothing is forbidden any more
            return self._random.choice([*range(97, 123), 32, 10])
        assert max(allowed) < 256 + len(WORDS)
        ends = [token for token in CLOSERS if bits[token]]
        return self._random.choice(ends if ends and self._random.random() < self._closing else allowed)

    def kind(self, ticket):
        return None

    def wait(self, ticket):
        pass

    def collect(self, ticket):
        return StepOutput(ticket[1])

    def close(self):
        pass


LIMITS = Limits(SlotLayout(4, (64,), 8), 16, (160,), VOCAB, 1000, 64, 0, 100)
NUMBERS = count()


def session(*, asynchronous=False, seed=0, eos=(EOS,), limits=LIMITS, closing=0.4):
    runner = RandomRunner(limits, asynchronous=asynchronous, seed=seed, closing=closing)
    engine = Engine(
        runner=runner, scheduler=Scheduler(limits), text=Bytes(), eos=eos, info=Ready(1000, 4, VOCAB, "t"),
        grammars=Grammars(Bytes(), eos, VOCAB),
    )  # fmt: skip
    return Session(engine=engine), runner


def ask(grammar, *, state="closed", thinking=None, **sampling):
    params = SamplingParams(**{"max_tokens": 300, **sampling})
    whole = whole_grammar([grammar], THINK, state) if grammar else ""
    return Generate(f"r{next(NUMBERS)}", (1, 2, 3), params, grammar=whole, thinking=thinking)


def answers(items, **options):
    made, _ = session(**options)
    made.send(*items)
    made.run()
    return [made.answer(item.id) for item in items]


SCHEMAS = [
    {}, True, {"type": "object"}, {"type": "integer", "minimum": 3, "maximum": 40}, {"type": ["string", "null"]},
    {"enum": [None, True, 1.5, 'a"b', "é"]}, {"const": {"a": [1]}}, {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
    {"allOf": [{"type": "integer"}, {"minimum": 3}]}, {"$ref": "#/$defs/S", "maxLength": 2, "$defs": {"S": {"type": "string"}}},
    {"type": "object", "additionalProperties": {"type": "integer"}, "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
    {"type": "object", "properties": {"naïve ключ": {"type": "number"}}, "required": ["naïve ключ"], "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1, "maxItems": 2},
    {"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/N"}}},
                                          "required": ["kids"], "additionalProperties": False}}},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"definitions": {"D": {"multipleOf": 5, "type": "integer"}}, "type": "array", "prefixItems": [{"$ref": "#/definitions/D"}], "items": False},
]  # fmt: skip


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_json_is_valid_or_cut(schema, asynchronous):
    items = [ask(json_grammar(schema, "f")) for _ in range(16)]
    whole = 0
    for _, text, finish, _ in answers(items, asynchronous=asynchronous, seed=len(str(schema))):
        assert finish in ("stop", "length")
        if finish == "stop":
            whole += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert whole >= 4


@pytest.mark.parametrize("eos", [(EOS,), ()])
def test_other_forms(eos):
    items = [
        ask(choice_grammar(["yes", 'no, "never"'])),
        ask(regex_grammar("[0-9]{3}-[a-f]/x")),
        ask('start: "a" (" b")~3'),
    ]
    yes, number, letters = (text for _, text, finish, _ in answers(items, eos=eos, closing=0.0) if finish == "stop")
    assert yes in ("yes", 'no, "never"')
    assert number[3] == "-"
    assert number[:3].isdecimal()
    assert number.endswith("/x")
    assert letters == "a b b b"


def test_white_space_has_a_limit():
    (answer,) = answers([ask(json_grammar({"type": "integer"}, "f"), max_tokens=900)], seed=3, closing=0.0)
    text = answer[1]
    assert len(text) - len(text.strip()) <= 80


def test_restricted_and_free_requests_run_together():
    made, runner = session(asynchronous=True, seed=5)
    items = [ask("" if index % 2 else json_grammar({"type": "object"}, "f"), max_tokens=40) for index in range(10)]
    made.send(*items)
    made.run()
    assert runner.free >= 5 * 39, "the free ones are never masked"
    for index, item in enumerate(items):
        tokens, text, finish, _ = made.answer(item.id)
        if index % 2:
            assert (len(tokens), finish) == (40, "length")
        else:
            assert text.lstrip().startswith("{")


def test_a_preempted_answer_goes_on_in_its_form():
    limits = Limits(SlotLayout(4, (64,), 8), 4, (40,), VOCAB, 150, 64, 0, 100)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 24}
    made, _ = session(asynchronous=True, seed=2, limits=limits, closing=0.0)
    items = [ask(json_grammar(schema, "f"), max_tokens=140) for _ in range(4)]
    made.send(*items)
    made.run()
    assert made.results[-1].gauges.preemptions > 0
    for item in items:
        _, text, finish, _ = made.answer(item.id)
        assert text.lstrip().startswith("[")
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("state", ["open", "unsaid"])
def test_a_thought_comes_before_the_form(state):
    thinking = Thinking("<think>", "</think>", state == "open")
    items = [
        ask(json_grammar({"type": "boolean"}, "f"), state=state, thinking=thinking, max_tokens=200, seed=seed)
        for seed in range(12)
    ]
    seen = set()
    for _tokens, text, finish, _ in answers(items, seed=8):
        thought, closed, rest = text.partition("</think>")
        seen.add(bool(closed))
        if finish == "stop":
            assert json.loads(rest if closed else thought) in (True, False)
    assert True in seen


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("budget", [1, 5, 30])
def test_a_thought_ends_after_its_budget(asynchronous, budget):
    ends = tuple(b"</think>")
    thinking = Thinking("<think>", "</think>", True, budget, ends)
    made, _ = session(asynchronous=asynchronous, seed=4)
    item = ask("", thinking=thinking, max_tokens=60)
    made.send(item)
    made.run()
    tokens, text, finish, _ = made.answer(item.id)
    assert tokens[budget : budget + len(ends)] == list(ends)
    assert text.index("</think>") == budget
    assert made.deltas(item.id)[-1].reasoning_tokens == budget + len(ends)
    assert (finish, len(tokens)) == ("length", 60)


def test_a_budget_and_a_form():
    thinking = Thinking("<think>", "</think>", True, 10, tuple(b"</think>"))
    items = [ask(json_grammar({"enum": [1]}, "f"), state="open", thinking=thinking) for _ in range(8)]
    for _, text, finish, _ in answers(items, seed=6, closing=0.0):
        assert finish == "stop"
        thought, _, rest = text.partition("</think>")
        assert len(thought.encode()) <= 10 * 8
        assert json.loads(rest) == 1


def test_stop_strings_do_not_count_inside_a_thought():
    made, _ = session(seed=1)
    thinking = Thinking("<think>", "</think>", True, 20, tuple(b"</think>"))
    inside, outside = (ask("", thinking=each, max_tokens=200, stop=tuple("abcdefghij")) for each in (thinking, None))
    made.send(inside, outside)
    made.run()
    tokens, text, finish, stop = made.answer(inside.id)
    assert len(tokens) > 28
    assert (finish, stop in "abcdefghij") == ("stop", True)
    assert any(letter in text.partition("</think>")[0] for letter in "abcdefghij")
    assert len(made.answer(outside.id)[0]) < 28


def test_control_tokens_are_no_text_unless_shown():
    grammar = regex_grammar("(<control>|x){20}")
    made, _ = session(seed=9, closing=0.0)
    plain, shown = ask(grammar, max_tokens=200), ask(grammar, max_tokens=200, shown_tokens=(CONTROL,))
    made.send(plain, shown)
    made.run()
    assert CONTROL not in made.answer(plain.id)[0]
    assert CONTROL in made.answer(shown.id)[0]
    assert "<control>" in made.answer(shown.id)[1]


def test_a_grammar_that_is_none_is_refused():
    made, _ = session()
    item = Generate("bad", (1,), SamplingParams(max_tokens=4), grammar="start: nothing")
    made.send(item)
    made.run()
    error = made.deltas("bad")[-1].error
    assert (error.type, error.code) == ("RequestError", "invalid_grammar")


def test_an_engine_without_grammars_refuses_them():
    runner = RandomRunner(LIMITS, asynchronous=False, seed=0)
    engine = Engine(
        runner=runner, scheduler=Scheduler(LIMITS), text=Bytes(), eos=(EOS,), info=Ready(1000, 4, VOCAB, "t")
    )
    made = Session(engine=engine)
    item = ask(json_grammar({}, "f"))
    made.send(item)
    made.run()
    assert made.deltas(item.id)[-1].error.kind == "unsupported"


def test_a_request_may_be_given_up_while_its_grammar_is_compiled():
    made, _ = session()
    item = ask(json_grammar({"type": "object"}, "f"))
    made.send(item, Abort(item.id))
    made.run()
    assert made.answer(item.id)[1:3] == ("", "abort")


def test_running_ahead_changes_no_token_and_costs_no_step():
    """Masks that wait for the token before are brought between the two halves of a step; all else stays as it is."""
    told = {}
    ends = tuple(b"</think>")
    for asynchronous in (False, True):
        made, runner = session(asynchronous=asynchronous, seed=11, closing=0.1)
        items = [
            ask(json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 9}, "f"), seed=1, max_tokens=40),
            ask("", seed=2, max_tokens=40, ignore_eos=True),
            ask("", seed=3, max_tokens=40, thinking=Thinking("<think>", "</think>", True, 6, ends)),
            ask(json_grammar({"type": "string", "minLength": 30}, "f"), seed=4, max_tokens=40),
        ]  # fmt: skip
        made.send(*items)
        made.run()
        told[asynchronous] = [made.answer(item.id) for item in items]
        assert bool(runner.late) is asynchronous
        for item in items:
            # When a grammar is compiled decides when its request begins; from then on every step brings it a token.
            steps = [(step, delta) for step, r in enumerate(made.results) for delta in r.deltas if delta.id == item.id]
            assert [step for step, _ in steps] == list(range(steps[0][0], steps[0][0] + len(steps)))
            assert [len(delta.tokens) for _, delta in steps] == [1] * len(steps)
    assert told[True] == told[False]
    assert len(told[True][0][0]) > 16


class Noting(Grammars):
    """Tells when it is asked to prepare."""

    def __init__(self):
        super().__init__(Bytes(), (EOS,), VOCAB)
        self.prepared = threading.Event()

    def prepare(self):
        super().prepare()
        self.prepared.set()


def noting(eager):
    grammars = Noting()
    engine = Engine(
        runner=RandomRunner(LIMITS, asynchronous=False, seed=1), scheduler=Scheduler(LIMITS), text=Bytes(), eos=(EOS,),
        info=Ready(1000, 4, VOCAB, "t"), grammars=grammars, eager=eager,
    )  # fmt: skip
    return engine, grammars


def test_tables_are_built_once_nobody_asks_for_anything(monkeypatch):
    monkeypatch.setattr(loop, "QUIET", 0.01)
    engine, grammars = noting(eager=True)
    inbox = SimpleQueue()
    thread = threading.Thread(target=engine.run, args=(inbox, lambda result: None))
    thread.start()
    assert grammars.prepared.wait(20)
    inbox.put(Closed())
    thread.join(20)
    grammars.close()
    assert [*grammars._tokenizers] == [frozenset()]


@pytest.mark.parametrize("eager", [False, True])
def test_requests_go_before_tables(eager):
    engine, grammars = noting(eager)
    made = Session(engine=engine)
    made.send(ask("", max_tokens=5), ask("", max_tokens=9))
    made.run()
    grammars.close()
    assert not grammars.prepared.is_set()
    assert not grammars._tokenizers


def test_a_grammar_that_nobody_waits_for_is_not_compiled():
    """The thread is busy with one grammar; the next two in its line are given up, and cost nothing."""
    busy, go = threading.Event(), threading.Event()
    grammars = Grammars(Bytes(), (EOS,), VOCAB)
    grammars._thread.submit(lambda: (busy.set(), go.wait(10)))
    engine = Engine(
        runner=RandomRunner(LIMITS, asynchronous=False, seed=1), scheduler=Scheduler(LIMITS), text=Bytes(), eos=(EOS,),
        info=Ready(1000, 4, VOCAB, "t"), grammars=grammars,
    )  # fmt: skip
    made = Session(engine=engine)
    wanted, *others = (ask(choice_grammar([f"yes {number}"])) for number in range(3))
    made.send(wanted, *others, *(Abort(item.id) for item in others))
    assert busy.wait(10)
    made.script[1] = []
    emit = made.emit

    def heard(result):
        go.set()
        emit(result)

    made.emit = heard
    made.run()
    assert [made.answer(item.id)[2] for item in others] == ["abort", "abort"]
    assert made.answer(wanted.id)[1:3] == ("yes 0", "stop")
    assert len(grammars._compiled) == 1

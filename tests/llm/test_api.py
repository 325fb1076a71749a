"""The Python API over a real model: a small random Llama on the CPU."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import atlas_core
from atlas_core import LLM
from atlas_core.llm import Result, Usage
from atlas_core.vocab.errors import CheckpointError, EngineError, PluginError, RequestError, UsageError

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
SIZES = {"hardware": "cpu", "numerics": "exact", "max_batch_size": 3, "max_prefill_tokens": 32, "max_seq_len": 128}
TALK = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, **SIZES, max_queue=1) as made:
        yield made


def test_greedy_ids_are_those_of_the_reference(llm):
    with np.load(TINY / "golden.npz") as golden:
        prompt, wanted = golden["input_ids"].tolist(), golden["gen_ids"].tolist()
    (result,) = llm.generate(prompt, temperature=0, max_tokens=16, ignore_eos=True)
    assert list(result.token_ids) == wanted
    assert result.prompt_token_ids == tuple(prompt)
    assert result.usage == Usage(len(prompt), 16, 0)
    assert (result.index, result.finish_reason, result.stop_reason, result.logprobs) == (0, "length", None, None)


def test_more_prompts_than_places_give_what_each_gives_alone(llm):
    prompts = [f"{'word ' * length}{length}" for length in (1, 9, 3, 12, 2, 5, 7, 1, 4)]
    params = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 9, "seed": 3}
    together = llm.generate(prompts, params)
    assert [result.index for result in together] == list(range(9))
    for index, prompt in enumerate(prompts):
        (alone,) = llm.generate(prompt, params)
        assert (alone.token_ids, alone.text) == (together[index].token_ids, together[index].text)


def test_choices_and_their_seeds(llm):
    made = llm.generate(["a b", "c d"], n=3, seed=7, temperature=1.0, max_tokens=6)
    assert [result.index for result in made] == [0, 0, 0, 1, 1, 1]
    (third,) = llm.generate("c d", seed=9, temperature=1.0, max_tokens=6)
    assert third.token_ids == made[5].token_ids
    assert len({result.token_ids for result in made[:3]}) == 3


def test_each_prompt_may_have_its_own_parameters(llm):
    few, many = llm.generate(["a b", "a b"], [{"max_tokens": 2}, {"max_tokens": 5}], temperature=0, ignore_eos=True)
    assert (len(few.token_ids), len(many.token_ids)) == (2, 5)
    assert many.token_ids[:2] == few.token_ids
    with pytest.raises(RequestError, match="1 sets of parameters for 2 prompts"):
        llm.generate(["a", "b"], [{"max_tokens": 2}])


def test_log_probabilities(llm):
    (scored,) = llm.generate([[5, 9, 2, 11]], max_tokens=1, prompt_logprobs=2)
    assert [position.chosen.id for position in scored.prompt_logprobs] == [9, 2, 11]
    assert {len(position.top) for position in scored.prompt_logprobs} == {2}
    assert scored.logprobs is None
    (result,) = llm.generate("a b", temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    assert result.prompt_logprobs is None
    assert [position.chosen.id for position in result.logprobs] == list(result.token_ids)
    for position in result.logprobs:
        assert [entry.logprob for entry in position.top] == sorted((e.logprob for e in position.top), reverse=True)
        assert position.top[0] == position.chosen
        assert len(position.top) == 3


def test_biases_and_stops_as_python_writes_them(llm):
    forced = {"logit_bias": {40: 100.0}, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    (result,) = llm.generate((1, 2, 3), forced)
    assert result.token_ids == (40,) * 5
    (stopped,) = llm.generate((1, 2, 3), forced, stop_token_ids=(40,))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ((40,), "stop", "40")
    (cut,) = llm.generate((1, 2, 3), forced, stop=("nowhere", result.text[:2]), include_stop_str_in_output=True)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (result.text[:2], "stop", result.text[:2])


def test_conversations_one_or_many(llm):
    options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    (one,) = llm.chat(TALK, **options)
    again, other = llm.chat([TALK, [{"role": "user", "content": "no"}]], **options)
    assert (again.token_ids, again.index, other.index) == (one.token_ids, 0, 1)
    assert other.prompt_token_ids != one.prompt_token_ids


def test_a_stream_is_the_same_answer_in_pieces(llm):
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    (whole,) = llm.chat(TALK, **options)
    deltas = list(llm.stream_chat(TALK, **options))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert sum((delta.tokens for delta in deltas), ()) == whole.token_ids
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    with pytest.raises(UsageError, match="a stream has one answer"):
        llm.stream_chat(TALK, n=2)


def test_a_stream_that_is_left_frees_its_place(llm):
    streams = [llm.stream_chat(TALK, ignore_eos=True) for _ in range(6)]
    for stream in streams:
        next(stream)
        stream.close()
    assert len(llm.generate(["a"] * 5, max_tokens=2, temperature=0)) == 5


def test_threads_share_an_engine(llm):
    found = {}
    wanted = llm.generate([f"number {i}" for i in range(6)], temperature=0, max_tokens=6)

    def ask(number):
        found[number] = llm.generate(f"number {number}", temperature=0, max_tokens=6)[0].token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(6)] == [result.token_ids for result in wanted]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temprature": 0}, "temprature is no sampling parameter"), ({"model": "x"}, "model is no sampling parameter"),
        ({"stream": True}, "stream is no"), ({"temperature": -1}, "temperature is not valid"), ({"n": 0}, "n is not valid"),
        ({"guided_json": {}}, "guided_json is not supported"), ({"stop_token_ids": [9999]}, "token 9999 does not exist"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens contradicts"), ({"max_tokens": True}, "max_tokens is not valid"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_anything_is_generated(llm, fields, told):
    with pytest.raises(RequestError, match=told):
        llm.generate(["fine", "fine"], [{}, fields])


def test_a_near_name_is_offered(llm):
    with pytest.raises(RequestError) as caught:
        llm.generate("a", temprature=0)
    assert caught.value.why == "did you mean temperature?"


@pytest.mark.parametrize("prompts", [[], "", [[]], [5000], ["a", 3], 7, [1.5], b"x", [["a"]], [[[1]]]])
def test_what_is_no_prompt(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, max_tokens=1)


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], [[]], [TALK, []], [{"role": "user"}]])
def test_what_is_no_conversation(llm, messages):
    with pytest.raises(RequestError):
        llm.chat(messages, max_tokens=1)


def test_a_prompt_that_is_too_long(llm):
    assert llm.info.max_seq_len == 128
    with pytest.raises(RequestError, match="context size is 128"):
        llm.generate([list(range(1, 130))])


def test_closed_is_closed():
    with LLM(str(TINY), **SIZES) as made:
        stream = made.stream_chat(TALK, ignore_eos=True)
        next(stream)
    made.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        made.generate("a")


def test_forgotten_is_closed():
    made = LLM(TINY, **SIZES)
    thread = made._engine._thread
    assert thread.is_alive()
    del made
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("settings", "kind", "told"),
    [
        ({"hardwear": "cpu"}, UsageError, "unknown key 'hardwear'; did you mean hardware"),
        ({"max_batch_size": 0}, UsageError, "max_batch_size"),
        ({"max_batch_size": "3"}, UsageError, "max_batch_size"),
        ({"port": 80}, UsageError, "LLM has no port"),
        ({"hardware": "gb100"}, PluginError, "gb100"),
    ],
)
def test_settings_that_are_wrong(settings, kind, told):
    with pytest.raises(kind, match=told):
        LLM(TINY, **settings)


def test_a_model_that_is_wrong(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="config.json"):
        LLM(tmp_path, hardware="cpu")
    with pytest.raises(UsageError, match="there is no model"):
        LLM("nothing")


def test_variables_hold_for_what_is_not_given(monkeypatch, tmp_path):
    (tmp_path / "atlas.toml").write_text("max_seq_len = 64\nmax_batch_size = 5\n")
    monkeypatch.setenv("ATLAS_CONFIG", str(tmp_path / "atlas.toml"))
    monkeypatch.setenv("ATLAS_MAX_BATCH_SIZE", "2")
    with LLM(TINY, hardware="cpu", max_prefill_tokens=None) as made:
        assert (made.info.max_seq_len, made.info.max_batch_size) == (64, 2)
        assert str(made.settings.source("hardware")) == "LLM: hardware"
        assert str(made.settings.source("max_batch_size")) == "ATLAS_MAX_BATCH_SIZE"


def test_importing_atlas_core_imports_no_engine():
    script = "import sys, atlas_core; print(*sys.modules); from atlas_core import LLM; print(LLM.__name__)"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert not {"numpy", "atlas_core.llm", "importlib.metadata", "msgspec"} & set(told[0].split())
    assert told[1] == "LLM"
    with pytest.raises(AttributeError, match="LLN"):
        _ = atlas_core.LLN
    assert "LLM" in dir(atlas_core)


def test_a_result_is_a_value(llm):
    (result,) = llm.generate("a", max_tokens=1, temperature=0)
    assert isinstance(result, Result)
    assert result == llm.generate("a", max_tokens=1, temperature=0)[0]

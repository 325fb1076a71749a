import logging

import pytest

from atlas_core.server.schema import ChatRequest, CompletionRequest, read_request
from atlas_core.server.translate import sampling_defaults, sampling_params, sampling_sources
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import CheckpointError, RequestError
from atlas_core.vocab.messages import Ready
from atlas_core.vocab.preset import ModelPreset
from atlas_core.vocab.sampling import SamplingParams

INFO = Ready(512, 8, 260, "fp")
MESSAGES = [{"role": "user", "content": "x"}]


def params(defaults=None, **body):
    return sampling_params(read_request(ChatRequest, {"messages": MESSAGES, **body}), defaults or {}, INFO)


def test_nothing_said_is_neutral():
    assert params() == SamplingParams()
    nulls = dict.fromkeys(
        ("temperature", "top_p", "seed", "stop", "max_tokens", "logit_bias", "n", "stream", "tools", "logprobs")
    )
    assert params(**nulls) == SamplingParams()


def test_everything_said():
    found = params(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.1,
        logit_bias={"7": 100, "3": -100.0}, seed=-5, max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[4],
        include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False, logprobs=True, top_logprobs=20,
    )  # fmt: skip
    assert found == SamplingParams(
        0.5, 0.9, 40, 0.1, -2.0, 2.0, 1.1, ((3, -100.0), (7, 100.0)), -5, 9, 2, ("a", "b"), (4,), True, True, False, 20
    )


def test_precedence():
    config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_new_tokens": 5,
        "eos_token_id": [1, 2],
        "do_sample": True,
    }
    defaults = sampling_defaults(config, ModelPreset("toy", "", ("toy",), sampling=(("top_p", 0.5),)))
    assert defaults == {"temperature": 0.6, "top_p": 0.5, "top_k": 20}
    flags = read_settings({"default_temperature": "0.3", "default_min_p": "0.05"}, {})
    asked = sampling_sources(config, ModelPreset("toy", "", ("toy",), sampling=(("top_p", 0.5),)), flags)
    assert [(name, value) for name, value, _ in asked] == [
        ("temperature", 0.3), ("top_p", 0.5), ("top_k", 20), ("min_p", 0.05),
    ]  # fmt: skip
    assert asked[0][2] == "--default-temperature"
    found = params(defaults, temperature=0)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.0, 0.5, 20, 0.0)


@pytest.mark.parametrize(
    "config", [{"top_p": 1.5}, {"temperature": "0.6"}, {"top_k": True}, {"repetition_penalty": 0.0}]
)
def test_a_bad_generation_config(config):
    with pytest.raises(CheckpointError, match=next(iter(config))):
        sampling_defaults(config, None)


@pytest.mark.parametrize(("asked", "meant"), [(0, 0), (-1, 0), (1, 1), (259, 259), (260, 0), (261, 0), (2147483648, 0)])
def test_top_k_edges(asked, meant):
    assert params(top_k=asked).top_k == meant


@pytest.mark.parametrize("body", [{"top_p": 0}, {"top_p": 1}, {"top_p": 1e-9}, {"min_p": 0}, {"min_p": 1}, {"temperature": 1e-7},
                                  {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"seed": 2**32 + 1}])  # fmt: skip
def test_edges_that_are_accepted(body):
    ((name, value),) = body.items()
    assert getattr(params(**body), name) == value


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"top_p": 1.5}, "top_p"), ({"top_p": -0.1}, "top_p"), ({"min_p": 1.1}, "min_p"), ({"top_k": -2}, "top_k"),
        ({"temperature": -1}, "temperature"), ({"temperature": "NaN"}, "temperature"), ({"temperature": float("inf")}, "temperature"),
        ({"temperature": True}, "temperature"), ({"seed": 2**63}, "seed"), ({"seed": 2**70}, "seed"), ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"), ({"seed": True}, "seed"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 1.0}, "n"),
        ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop[1]"), ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"stop": [3]}, "stop[0]"), ({"presence_penalty": 2.1}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"), ({"stop_token_ids": [260]}, "stop_token_ids[0]"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"), ({"stream": 1}, "stream"), ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"audio": {}}, "audio"), ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": 5}, "tools"), ({"tool_choice": 5}, "tool_choice"), ({"response_format": "json"}, "response_format"), ({"top_n_sigma": 1.0}, "top_n_sigma"), ({"echo": True}, "echo"),
        ({"reasoning_effort": "unheard"}, "reasoning_effort"), ({"reasoning": {"effort": "unheard"}}, "reasoning.effort"),
        ({"thinking": {"type": "on"}}, "thinking.type"), ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"enable_thinking": "no"}, "enable_thinking"), ({"thinking_budget": -1}, "thinking_budget"), ({"max_thinking_tokens": "9"}, "max_thinking_tokens"),
        ({"timeout": 5}, "timeout"), ({"num_beams": 2}, "num_beams"), ({"src_lang": "de"}, "src_lang"), ({"tgt_lang": "en"}, "tgt_lang"),
        ({"repetition_detection": {"min_count": 3}}, "repetition_detection"), ({"report_expert_metadata": True}, "report_expert_metadata"),
        ({"lora_path": "a"}, "lora_path"), ({"repeat_penalty": 1.1}, "repeat_penalty"), ({"stop_regex": "a+"}, "stop_regex"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(body, field):
    with pytest.raises(RequestError) as caught:
        params(**body)
    assert caught.value.field == field
    assert caught.value.kind in ("invalid", "unsupported")


@pytest.mark.parametrize("body", [{"tools": []}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]},
                                  {"num_beams": 1, "repeat_penalty": 1.0, "report_expert_metadata": False}, {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}, {"brand_new": 1}])  # fmt: skip
def test_values_that_change_nothing_are_accepted(body):
    assert params(**body) == SamplingParams()


def test_a_stop_list_may_have_sixteen():
    assert len(params(stop=[str(i) for i in range(16)]).stop) == 16
    assert params(stop="x").stop == ("x",)
    assert params(stop=[]).stop == ()


def test_max_completion_tokens_wins():
    assert params(max_tokens=5, max_completion_tokens=3).max_tokens == 3


def test_completions_logprobs():
    request = read_request(CompletionRequest, {"prompt": "x", "logprobs": 0})
    assert sampling_params(request, {}, INFO).logprobs == 0
    assert sampling_params(read_request(CompletionRequest, {"prompt": "x"}), {}, INFO).logprobs is None


def test_the_context_size(serve):
    server = serve()
    nine = [1] * 9
    for asked, made in ((505, 503), (503, 503), (1, 1)):
        body = server.complete(prompt=nine, max_tokens=asked, ignore_eos=True).json()
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (made, "length")
    assert server.complete(prompt=[1] * 511, max_tokens=5, ignore_eos=True).json()["usage"]["completion_tokens"] == 1
    for size in (512, 513):
        response = server.complete(prompt=[1] * size)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert f"{size} tokens" in error["message"]
        assert "context size is 512" in error["message"]
    assert server.chat(ignore_eos=True).json()["choices"][0]["finish_reason"] == "length"


def test_unknown_fields_are_told_once(serve, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)
    server = serve()
    with caplog.at_level("WARNING", "atlas.server"):
        assert server.chat(novelty=1, user="u").status_code == 200
        assert server.chat(novelty=2, store=True).status_code == 200
        assert server.chat(store=True, metadata={"a": "b"}).status_code == 200
    told = [record.getMessage() for record in caplog.records if record.name == "atlas.server"]
    assert told == [f"requests have '{name}', which has no effect here" for name in ("novelty", "store")]

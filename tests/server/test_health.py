import asyncio
import json
import logging
import re

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from atlas_core import __version__
from atlas_core.server.aliases import NAMES
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import Service
from atlas_core.settings import read_settings
from atlas_core.vocab.errors import CheckpointError, DeviceError
from atlas_core.vocab.messages import Gauges, Progress


def samples(server):
    text = server.http.get("/metrics").text
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_loading_then_ready(serve, kit):
    engine = kit.engine()
    go = []

    async def bring_up(on_progress):
        on_progress(Progress("weights", 3, 10, "layer 1"))
        while not go:  # noqa: ASYNC110 set by another thread
            await asyncio.sleep(0.005)
        return Service(engine, kit.model())

    server = serve(engine, bring_up=bring_up, state="loading")
    kit.until(lambda: server.http.get("/health").json()["progress"]["phase"] == "weights")
    health = server.http.get("/health")
    assert health.status_code == 503
    assert health.json() == {
        "status": "loading",
        "progress": {"phase": "weights", "done": 3, "total": 10, "note": "layer 1"},
    }
    assert server.http.get("/live").status_code == 200
    for response in (server.chat(stream=True), server.complete(), server.http.get("/v1/models")):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert int(response.headers["retry-after"]) > 0
    assert samples(server)["atlas_ready"] == 0
    go.append(1)
    server.wait()
    assert server.http.get("/health").json() == {"status": "ready"}
    assert server.chat().status_code == 200
    assert server.reporter.events[-1] == ("ready", server.url, engine.info)


def test_a_fault_outranks_everything_and_is_final(serve):
    server = serve()
    server.engine.state = "faulted"
    assert (server.http.get("/health").status_code, server.http.get("/health").json()["status"]) == (503, "faulted")
    server.engine.fault = DeviceError(
        "step 7 has failed", "Waiting for an event: the device said so", "restart the engine"
    )
    assert server.http.get("/health").json() == {
        "status": "faulted", "message": "step 7 has failed", "why": "Waiting for an event: the device said so",
        "cure": "restart the engine",
    }  # fmt: skip
    assert server.http.get("/live").status_code == 503
    response = server.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "faulted")
    assert response.headers["x-should-retry"] == "false"
    assert samples(server)["atlas_ready"] == 0


def test_a_start_that_fails_ends_the_server(kit):
    async def bring_up(on_progress):
        raise CheckpointError("model.safetensors is cut", "", "")

    server = kit.running(kit.engine(), ServerOptions(), kit.model(), bring_up)
    server.thread.join(5)
    assert not server.thread.is_alive()
    assert isinstance(server.app.lifecycle.error, CheckpointError)
    assert server.app.lifecycle.state == "faulted"
    with pytest.raises(httpx.TransportError):
        server.http.get("/health")
    server.http.close()


def test_models(serve, kit):
    server = serve()
    body = server.http.get("/v1/models").json()
    assert body["object"] == "list"
    assert [entry["id"] for entry in body["data"]] == ["tiny", "org/tiny"]
    assert body["data"][1] == {
        "id": "org/tiny", "object": "model", "created": 1700000000, "owned_by": "atlas", "root": "tiny", "parent": None,
        "max_model_len": 512, "meta": {"n_vocab": kit.vocab, "n_ctx": 512},
    }  # fmt: skip
    assert server.http.get("/v1/models/org/tiny").json() == body["data"][1]
    response = server.http.get("/v1/models/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_model_names_in_requests(serve):
    server = serve()
    assert [server.chat(model=name).json()["model"] for name in ("org/tiny", "gpt-x", None)] == [
        "org/tiny",
        "tiny",
        "tiny",
    ]
    strict = serve(strict_model=True)
    assert strict.chat(model="org/tiny").status_code == 200
    response = strict.chat(model="gpt-x")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_one_token_shows_that_the_engine_answers(serve, kit):
    engine = kit.engine()
    server = serve(engine, api_keys=("secret",))
    assert server.http.get("/health_generate").status_code == 401
    key = {"authorization": "Bearer secret"}
    answer = server.http.get("/health_generate", headers=key)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert engine.requests[-1].sampling.max_tokens == 1
    assert server.app.gate.inside == 0
    engine.closed = True
    assert server.http.get("/health_generate", headers=key).status_code == 503


def test_life_and_readiness_by_all_their_names(serve):
    server = serve()
    for path in ("/live", "/health/live", "/health", "/ready", "/health/ready", "/ping"):
        assert server.http.get(path).json() == {"status": "ready"}


def test_version(serve):
    assert serve().http.get("/version").json() == {"version": __version__}


def test_tokenize_and_back(serve, kit):
    server = serve()
    post = server.http.post
    body = post("/tokenize", json={"prompt": "hé<eos>"}).json()
    assert body == {"tokens": [kit.bos, *"hé".encode(), kit.eos], "count": 5, "max_model_len": 512}
    assert post("/tokenize", json={"content": "<eos>", "add_special": False, "parse_special": False}).json()[
        "tokens"
    ] == [*b"<eos>"]
    turns = [{"role": "user", "content": "hi"}]
    ids = post("/tokenize", json={"messages": turns}).json()["tokens"]
    assert server.chat(messages=turns, return_token_ids=True).json()["prompt_token_ids"] == ids
    back = post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back == {"prompt": "<bos>hé<eos>", "text": "<bos>hé<eos>", "content": "<bos>hé<eos>"}
    assert post("/tokenize", json={}).json()["error"]["param"] == "prompt"
    assert post("/detokenize", json={"tokens": [260]}).json()["error"]["param"] == "tokens[0]"


def test_metrics(serve, kit):
    server = serve(kit.engine(delay=0.002))
    made = len(kit.answer.encode()) + 1
    server.chat()
    server.chat(stream=True, max_tokens=3)
    server.chat(temperature=-1)
    server.http.get("/no/such/path")
    kit.until(lambda: 'status="404"} 1.0' in server.http.get("/metrics").text)
    found = samples(server)
    chat = 'endpoint="/v1/chat/completions"'
    assert found[f'atlas_requests_total{{{chat},status="200"}}'] == 2
    assert found[f'atlas_requests_total{{{chat},status="400"}}'] == 1
    assert found['atlas_requests_total{endpoint="other",status="404"}'] == 1
    assert (
        found['atlas_sequences_finished_total{reason="stop"}']
        == found['atlas_sequences_finished_total{reason="length"}']
        == 1
    )
    assert found["atlas_prompt_tokens_total"] == 2 * len(b"[user]hi\n[assistant]")
    assert found["atlas_cached_tokens_total"] == 2
    assert found["atlas_generation_tokens_total"] == made + 3
    assert found["atlas_time_to_first_token_seconds_count"] == 2
    assert found["atlas_inter_token_latency_seconds_count"] == made + 3 - 2
    assert 0.002 * (made + 1) <= found["atlas_inter_token_latency_seconds_sum"] < 5
    assert found[f"atlas_request_latency_seconds_count{{{chat}}}"] == 3
    assert (found["atlas_ready"], found["atlas_preemptions_total"], found["atlas_steps_total"]) == (1, 2, 7)
    server.engine.running = 4
    assert samples(server)["atlas_kv_usage_ratio"] == 4 * 16 / 1024
    assert samples(server)["atlas_requests_running"] == 4
    server.engine.running = 0


def test_times_of_a_sequence(serve, kit):
    def answer(request):
        found = kit.deltas(request)
        return [found[0]._replace(started=request.arrival + 0.001), *found[1:]]

    server = serve(kit.engine(answer=answer, prefill=0.02, delay=0.002))
    server.chat(max_tokens=11)
    server.chat(max_tokens=1)
    kit.until(lambda: samples(server)["atlas_sequence_latency_seconds_count"] == 2)
    found = samples(server)
    assert found["atlas_request_queue_seconds_sum"] == pytest.approx(0.002)
    assert found["atlas_request_prefill_seconds_count"] == 2
    assert found["atlas_request_prefill_seconds_sum"] >= 2 * 0.02
    assert found["atlas_request_decode_seconds_sum"] >= 10 * 0.002
    assert found["atlas_time_per_output_token_seconds_count"] == 1
    each = found["atlas_time_per_output_token_seconds_sum"]
    assert each == pytest.approx(found["atlas_request_decode_seconds_sum"] / 10)
    whole = found["atlas_sequence_latency_seconds_sum"]
    parts = ("queue", "prefill", "decode")
    assert whole == pytest.approx(sum(found[f"atlas_request_{part}_seconds_sum"] for part in parts))


def test_the_cache_is_told_before_the_first_step(serve, kit, monkeypatch):
    monkeypatch.setattr(kit.engine, "gauges", Gauges())
    monkeypatch.setattr(kit.engine, "info", replace(kit.engine().info, page_tokens=16, kv_tokens=2048))
    found = samples(serve())
    label = 'max_batch_size="8",max_seq_len="512",page_tokens="16",pages="128"'
    assert found[f"atlas_cache_config_info{{{label}}}"] == 1
    assert (found["atlas_kv_tokens_total"], found["atlas_kv_usage_ratio"]) == (2048, 0)


def test_names_of_another_server(serve, kit):
    server = serve(kit.engine(delay=0.001), metrics_aliases=("vllm",))
    server.chat(max_tokens=3)
    kit.until(lambda: samples(server)["atlas_sequence_latency_seconds_count"] == 1)
    found = samples(server)
    model = 'model_name="tiny"'
    own = {
        "num_requests_running": "requests_running", "num_requests_waiting": "requests_waiting",
        "kv_cache_usage_perc": "kv_usage_ratio", "prompt_tokens_total": "prompt_tokens_total",
        "prefix_cache_queries_total": "prompt_tokens_total", "prefix_cache_hits_total": "cached_tokens_total",
        "generation_tokens_total": "generation_tokens_total", "num_preemptions_total": "preemptions_total",
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "e2e_request_latency_seconds_sum": "sequence_latency_seconds_sum",
        "request_queue_time_seconds_count": "request_queue_seconds_count",
        "request_prefill_time_seconds_count": "request_prefill_seconds_count",
        "request_decode_time_seconds_count": "request_decode_seconds_count",
        "request_time_per_output_token_seconds_count": "time_per_output_token_seconds_count",
    }  # fmt: skip
    assert {name: found[f"vllm:{name}{{{model}}}"] for name in own} == {
        name: found[f"atlas_{ours}"] for name, ours in own.items()
    }
    assert found[f'vllm:request_success_total{{finished_reason="length",{model}}}'] == 1
    assert found[f'vllm:time_to_first_token_seconds_bucket{{le="+Inf",{model}}}'] == 1
    assert any(name.startswith("vllm:cache_config_info{block_size=") for name in found)
    assert not [name for name in found if name.startswith("vllm:") and "_created" in name]
    families = {family.name for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    assert {"vllm:num_requests_running", "atlas_requests_running"} <= families


def test_names_of_further_servers(serve, kit):
    server = serve(kit.engine(delay=0.001), metrics_aliases=("sglang", "llamacpp"))
    server.chat(max_tokens=3)
    kit.until(lambda: samples(server)["atlas_sequence_latency_seconds_count"] == 1)
    found = samples(server)
    own = {
        "sglang:num_running_reqs": "requests_running", "sglang:num_queue_reqs": "requests_waiting",
        "sglang:token_usage": "kv_usage_ratio", "sglang:num_used_tokens": "kv_tokens_used",
        "sglang:prompt_tokens_total": "prompt_tokens_total", "sglang:generation_tokens_total": "generation_tokens_total",
        "sglang:cached_tokens_total": "cached_tokens_total",
        "sglang:time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
        "sglang:inter_token_latency_seconds_count": "inter_token_latency_seconds_count",
        "sglang:e2e_request_latency_seconds_sum": "sequence_latency_seconds_sum",
        "llamacpp:requests_processing": "requests_running", "llamacpp:requests_deferred": "requests_waiting",
        "llamacpp:prompt_tokens_total": "prompt_tokens_total", "llamacpp:tokens_predicted_total": "generation_tokens_total",
    }  # fmt: skip
    assert {name: found[f'{name}{{model_name="tiny"}}'] for name in own} == {
        name: found[f"atlas_{ours}"] for name, ours in own.items()
    }
    assert found['llamacpp:tokens_predicted_total{model_name="tiny"}'] == 3
    assert not [name for name in found if name.startswith("vllm:")]


def test_no_alias_leads_nowhere_and_all_can_be_asked_for(serve):
    server = serve(metrics_aliases=tuple(NAMES))
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    own = {family.name.removesuffix("_info") for family in families}
    for _, names in NAMES.values():
        assert names.keys() <= own
    assert read_settings({"metrics_aliases": tuple(NAMES)}, {}).metrics_aliases == tuple(NAMES)


def test_no_other_names_unless_asked_for(serve):
    assert "vllm" not in serve().http.get("/metrics").text


@pytest.mark.parametrize("as_json", [False, True])
def test_one_line_a_request(serve, kit, caplog, monkeypatch, as_json):
    monkeypatch.setattr(logging.getLogger("atlas"), "propagate", True)
    server = serve(json_logs=as_json)

    def lines():
        told = [record.getMessage() for record in caplog.records if record.name == "atlas.request"]
        return [line for line in told if "/health" not in line]

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with caplog.at_level("INFO", "atlas.request"):
        server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "r1"})
        kit.until(lambda: len(lines()) == 1)
        server.http.post("/v1/chat/completions", content=b"[]", headers={"x-request-id": "r2"})
        kit.until(lambda: len(lines()) == 2)
        server.http.get("/a%0ab")
        kit.until(lambda: len(lines()) == 3)
    good, bad, odd = lines()
    if as_json:
        first = json.loads(good)
        assert first.pop("seconds") >= first.pop("first_token") > 0
        assert first == {
            "id": "r1", "method": "POST", "path": "/v1/chat/completions", "endpoint": "/v1/chat/completions", "key": "",
            "model": "tiny", "stream": False, "status": 200, "prompt_tokens": 20, "cached_tokens": 1, "completion_tokens": 2,
            "finish": ["length"], "error": None,
        }  # fmt: skip
        assert (json.loads(bad)["status"], json.loads(bad)["error"]) == (400, "the body is not a JSON object")
        assert json.loads(odd)["path"] == "/a\nb"
    else:
        line = r"POST /v1/chat/completions 200 \d+ms prompt=20 cached=1 completion=2 ttft=\d+ms finish=length model=tiny id=r1"
        assert re.fullmatch(line, good)
        assert re.fullmatch(r"POST /v1/chat/completions 400 \d+ms id=r2 error='the body is not a JSON object'", bad)
        assert odd.startswith("GET /a?b 404 ")
        assert "\n" not in odd

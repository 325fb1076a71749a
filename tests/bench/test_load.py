import json
import threading
import time

import pytest

from atlas_core.bench.load import put_load
from atlas_core.bench.report import summarise, table
from atlas_core.bench.sample import Sample, read_sample
from atlas_core.bench.workload import Workload
from atlas_core.vocab.errors import EngineError, RequestError

USAGE = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4}}


def ticking(*times):
    left = list(times)
    return lambda: left.pop(0)


def piece(text):
    return {"choices": [{"text": text}]}


def test_a_stream_becomes_a_sample():
    events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}, piece("a"), piece(""), piece("b"), USAGE]
    assert read_sample(events, 1.0, 1.5, ticking(2.0, 3.0, 4.0)) == Sample(1.0, 1.5, 4.0, (2.0, 3.0), 10, 4)


def test_deltas_of_chats_and_thoughts_count():
    events = [{"choices": [{"delta": {"reasoning_content": "hm"}}]}, {"choices": [{"delta": {"content": "a"}}]}]
    assert read_sample(events, 0.0, 0.0, ticking(1.0, 2.0, 3.0)) == Sample(
        0.0, 0.0, 3.0, (1.0, 2.0), 0, 2, counted=False
    )


def test_an_answer_without_text_is_a_failure():
    with pytest.raises(EngineError, match="no text"):
        read_sample([USAGE], 0.0, 0.0, ticking())


class Scripted:
    """Answers with two pieces; every third request is refused."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running, self.most, self.asked = 0, 0, []

    def stream(self, path, body):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.asked.append((path, body["prompt"]))
        try:
            time.sleep(0.002)
            if int(body["prompt"].split()[0]) % 3 == 2:
                raise RequestError("too many requests")
            yield piece("a")
            yield piece("b")
            yield USAGE
        finally:
            with self.lock:
                self.running -= 1


def test_every_request_is_sent_once_and_no_more_at_once_than_allowed():
    server, heard = Scripted(), []
    workload = Workload("m", requests=30, concurrency=4, prompt_tokens=2)
    samples = put_load(server, workload, heard.append)
    assert samples == heard
    assert sorted(prompt for _, prompt in server.asked) == sorted(body["prompt"] for body in workload.bodies())
    assert {path for path, _ in server.asked} == {"/completions"}
    assert 1 < server.most <= 4
    summary = summarise(samples)
    assert (summary.requests, summary.succeeded, summary.errors) == (30, 20, {"too many requests": 10})
    assert (summary.prompt_tokens, summary.completion_tokens) == (200, 80)


def test_a_strange_answer_fails_one_request_and_not_the_measurement():
    class Strange:
        def stream(self, path, body):
            yield {"choices": ["what?"]}

    samples = put_load(Strange(), Workload("m", requests=2), lambda sample: None)
    assert [sample.error.partition(":")[0] for sample in samples] == ["AttributeError"] * 2


def test_with_a_rate_waiting_for_a_place_counts():
    class Slow:
        def stream(self, path, body):
            time.sleep(0.02)
            yield piece("a")

    samples = put_load(Slow(), Workload("m", requests=6, concurrency=1, rate=1e6), lambda sample: None)
    waits = sorted(sample.arrivals[0] - sample.due for sample in samples)
    assert waits[-1] >= 6 * 0.02
    assert all(sample.sent >= sample.due for sample in samples)


def test_figures():
    samples = [
        Sample(0.0, 0.0, 2.0, (0.5, 1.0, 2.0), 10, 3),
        Sample(1.0, 1.5, 4.0, (2.0, 4.0), 20, 5),
        Sample(1.0, 1.0, 1.2, error="refused"),
    ]
    summary = summarise(samples)
    assert summary.seconds == 4.0
    assert summary.requests_per_second == 0.5
    assert summary.output_tokens_per_second == 2.0
    assert summary.total_tokens_per_second == 9.5
    assert (summary.ttft_ms.p50, summary.ttft_ms.largest) == (750.0, 1000.0)
    assert (summary.inter_token_ms.count, summary.inter_token_ms.p50) == (3, 1000.0)
    assert summary.per_token_ms.mean == (750.0 + 500.0) / 2
    assert summary.end_to_end_ms.largest == 3000.0
    text = "\n".join(table(summary))
    assert "2 of 3 answered in 4.00 s" in text
    assert "failed 1 × refused" in text
    made = json.loads(json.dumps(summary.as_json(Workload("m"), "http://h/v1")))
    assert made["workload"]["seed"] == 0
    assert made["ttft_ms"]["p99"] == pytest.approx(995.0)


def test_nothing_but_failures():
    summary = summarise([Sample(0.0, 0.0, 0.0, error="x")])
    assert (summary.succeeded, summary.requests_per_second, summary.ttft_ms) == (0, 0.0, None)

from itertools import islice, pairwise

import pytest

from atlas_core.bench.workload import Workload
from atlas_core.vocab.errors import UsageError


def test_the_same_seed_gives_the_same_load():
    one, other = Workload("m", requests=5, rate=3.0, seed=4), Workload("m", requests=5, rate=3.0, seed=4)
    assert list(one.bodies()) == list(other.bodies())
    assert one.arrivals() == other.arrivals()
    assert one.arrivals() != Workload("m", requests=5, rate=3.0, seed=5).arrivals()


def test_a_body():
    (body,) = Workload("m", requests=1, prompt_tokens=3, max_tokens=7, seed=9).bodies()
    prompt = body.pop("prompt")
    assert prompt.split()[0] == "0"
    assert len(prompt.split()) == 3
    assert body == {
        "model": "m", "max_tokens": 7, "temperature": 0, "seed": 9, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_chat_asks_the_same_as_a_message():
    sizes = {"requests": 2, "prompt_tokens": 4}
    plain = [body["prompt"] for body in Workload("m", **sizes).bodies()]
    chat = Workload("m", endpoint="chat", ignore_eos=True, **sizes)
    bodies = list(chat.bodies())
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": text}] for text in plain]
    assert all(body["ignore_eos"] is True for body in bodies)
    assert chat.path == "/chat/completions"


def test_no_two_prompts_share_a_beginning():
    prompts = [body["prompt"] for body in Workload("m", requests=50).bodies()]
    assert len({prompt.split()[0] for prompt in prompts}) == 50


def test_arrivals_have_the_rate():
    arrivals = Workload("m", requests=4000, rate=20.0).arrivals()
    assert arrivals[0] == 0.0
    assert all(before < after for before, after in islice(pairwise(arrivals), 100))
    assert 4000 / arrivals[-1] == pytest.approx(20.0, rel=0.05)
    assert Workload("m", requests=3).arrivals() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "bad", [{"requests": 0}, {"concurrency": 0}, {"rate": 0.0}, {"rate": float("inf")}, {"max_tokens": 0}]
)
def test_sizes_that_measure_nothing(bad):
    with pytest.raises(UsageError):
        Workload("m", **bad)

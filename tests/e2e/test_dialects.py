"""Server, engine and model together: forms of answers on real models, and tools on a model that does as it is told."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from atlas_core.assembly.engine import Ledger, engine_of
from atlas_core.assembly.served import dialects, served_model
from atlas_core.engine.client import InProcessClient
from atlas_core.engine.grammar import Grammars
from atlas_core.engine.loop import Engine, StepOutput
from atlas_core.ops.step import SlotLayout
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.plan import LAST_TOKEN_MARKER
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.server.app import Application
from atlas_core.server.listen import bind_socket, url_of
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import ServedModel, Service
from atlas_core.server.run import DrainingServer
from atlas_core.settings import read_settings
from atlas_core.testing.models import ScriptedModel
from atlas_core.text.detokenize import Detokenizer
from atlas_core.text.dialect.choice import choose
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.messages import Ready

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog", None]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
Serve = Callable[[Callable[[Any], Engine], ServedModel], str]


class Silent:
    """A reporter to nobody."""

    def progress(self, progress: Any) -> None: ...
    def ready(self, url: str, info: Any) -> None: ...
    def notice(self, text: str) -> None: ...


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve an engine on a thread of this process; gives the URL. It is down again at the end."""
    with ExitStack() as stack:

        def start(build: Callable[[Any], Engine], served: ServedModel) -> str:
            async def bring_up(on_progress: Any) -> Service:
                client = InProcessClient(lambda settings, report: build(report))
                await client.start(on_progress)
                return Service(client, served)

            app = Application(bring_up, ServerOptions(), Silent())
            listener = bind_socket("127.0.0.1", 0)
            app.url = url_of(listener)
            server = DrainingServer(app)
            app.failed = server.stop
            thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
            thread.start()
            stack.callback(thread.join, 20)
            stack.callback(server.stop)
            for _ in range(400):
                if httpx.get(f"{app.url}/health", trust_env=False).status_code == 200:
                    return app.url
                time.sleep(0.05)
            raise AssertionError("the server did not get ready")

        yield start


def asked(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=300)


def real(make: Any, registry: Any, model: str, **flags: Any) -> tuple[Callable[[Any], Engine], ServedModel]:
    given = {name: str(value) for name, value in flags.items()}
    settings = read_settings({"model": model, "hardware": "cpu", **given}, {})
    built = make(model, max_batch_size=4, **{k: v for k, v in flags.items() if k == "max_seq_len"})
    return lambda report: engine_of(built, registry, Ledger(report)), served_model(settings, settings, registry)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer: "


def test_every_whole_answer_of_a_tiny_model_validates(make: Any, registry: Any, serve: Serve) -> None:
    client = asked(serve(*real(make, registry, str(TINY), chat_template=TEMPLATE)))
    whole = 0
    for seed in range(6):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a pet"}], response_format=FORMAT, max_tokens=120, n=4, seed=10 * seed,
            temperature=1.0,
        )  # fmt: skip
        for choice in answer.choices:
            assert choice.finish_reason in ("stop", "length")
            if choice.finish_reason == "stop":
                whole += 1
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert whole >= 6


def test_other_forms_of_a_tiny_model(make: Any, registry: Any, serve: Serve) -> None:
    client = asked(serve(*real(make, registry, str(TINY), chat_template=TEMPLATE)))

    def complete(**form: Any) -> str:
        answer = client.completions.create(
            model="m", prompt="x", max_tokens=60, extra_body={"structured_outputs": form}
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert complete(choice=["red", "green"]) in ("red", "green")
    assert len(complete(regex="[0-9]{4}")) == 4
    assert complete(grammar='start: "a" | "bc" "d"') in ("a", "bcd")
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True, max_tokens=60,
        extra_body={"structured_outputs": {"json": {"type": "boolean"}}},
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) in ("true", "false")


def test_smollm2_fills_in_a_form(make: Any, registry: Any, serve: Serve) -> None:
    client = asked(serve(*real(make, registry, "smollm2", max_seq_len=512)))
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Describe a cat called Tom, aged 3, as JSON."}], response_format=FORMAT,
        max_tokens=100, temperature=0.7, n=2, seed=1,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert "stop" in {choice.finish_reason for choice in answer.choices}


WORDS = [
    "[user]", "[call]", "[answer]", "<eos>", "<think>", "I need", " the weather.", "</think>", "\n\n", "<tool_call>", "\n{",
    '"name": "get_weather", ', '"arguments": ', '{"town": "', "Gr", 'az", "days": ', "2}}", "\n</tool_call>", "It is ", "sunny.",
]  # fmt: skip
FIRST = len(WORDS)
EOS = WORDS.index("<eos>")
CALL = [WORDS.index(word) for word in WORDS[4:18]]
ANSWER = [WORDS.index(word) for word in ("It is ", "sunny.")]


class WordTokenizer:
    """Whole words as tokens, and bytes for everything else."""

    special_ids = frozenset({0, 1, 2, EOS})
    special_tokens = frozenset(WORDS[token] for token in (0, 1, 2, EOS))
    vocab_size = FIRST + 256

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token].encode() if token < FIRST else bytes([token - FIRST])

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            word = next((w for w in WORDS[:3] if text.startswith(w)), None) if parse_special else None
            ids += [WORDS.index(word)] if word else [FIRST + byte for byte in text[0].encode()]
            text = text[len(word or text[0]) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(token) for token in ids).decode()

    def detokenizer(self, *, skip_special: bool = True, shown: Sequence[int] = ()) -> Detokenizer:
        return Detokenizer(lambda token: b"" if skip_special and token in self.special_ids else self.token_bytes(token))


class Scripted:
    """A StepRunner in which every token is followed by the one that a ScriptedModel says, on slots as a device keeps them."""

    def __init__(self, model: ScriptedModel, layout: SlotLayout, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._model = model
        self._last = [0] * layout.slots

    def launch(self, plan: Any) -> list[int]:
        sampled = []
        for row, slot in enumerate(plan.row_slot):
            tokens = plan.token_ids[plan.cu_q[row] : plan.cu_q[row + 1]]
            last = self._last[slot] if tokens[-1] == LAST_TOKEN_MARKER else tokens[-1]
            if row in plan.sample_row:
                (self._last[slot],) = self._model.continuation(last, 1)
                sampled.append(self._last[slot])
        return sampled

    def kind(self, ticket: list[int]) -> None: ...

    def wait(self, ticket: list[int]) -> None: ...

    def collect(self, ticket: list[int]) -> StepOutput:
        return StepOutput(ticket)

    def close(self) -> None: ...


CHAT = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}[user]{{ m.role }}{{ m.reasoning_content }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.town }}{% endfor %}{% endfor %}"
    "{{ '[answer]' if messages[-1].role == 'tool' else '[call]' }}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def scripted(request: pytest.FixtureRequest, registry: Any, serve: Serve) -> openai.OpenAI:
    """A model that thinks, calls a tool, and answers once it sees a result."""
    successor = [EOS] * (FIRST + 256)
    for chain in ([1, *CALL, EOS], [2, *ANSWER, EOS]):
        for token, following in itertools.pairwise(chain):
            successor[token] = following
    model = ScriptedModel(successor, (EOS,))
    tokenizer = WordTokenizer()
    limits = Limits(SlotLayout(4, (64,), 8), 16, (256,), len(successor), 1000, 64, 0, 16)

    def build(report: Any) -> Engine:
        return Engine(
            runner=Scripted(model, limits.layout, asynchronous=request.param), scheduler=Scheduler(limits), text=tokenizer, eos=(EOS,),
            info=Ready(1000, 4, len(successor), "scripted"), grammars=Grammars(tokenizer, (EOS,), len(successor)),
        )  # fmt: skip

    speech = choose(dialects(registry), "<tool_call> <think>")
    template = ChatTemplate(CHAT, {}, strftime=time.strftime)
    return asked(serve(build, ServedModel(("scripted",), tokenizer, template, 0, speech=speech)))


USER = {"role": "user", "content": "weather in Graz?"}


def test_a_whole_exchange(scripted: openai.OpenAI) -> None:
    create = scripted.chat.completions.create
    messages: list[Any] = [USER]
    first = create(model="m", messages=messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    assert first.message.reasoning_content == "I need the weather."
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"town": "Graz", "days": 2})
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    second = create(model="m", messages=messages, tools=[TOOL])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is sunny.", "stop")


def test_a_whole_exchange_streamed(scripted: openai.OpenAI) -> None:
    messages: list[Any] = [USER]
    with scripted.chat.completions.stream(
        model="m", messages=messages, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    assert final.usage.completion_tokens == len(CALL) + 1
    assert final.usage.completion_tokens_details.reasoning_tokens == 4
    message = final.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"town": "Graz", "days": 2}
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    chunks = list(scripted.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is sunny."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_strings_wait_for_the_answer(scripted: openai.OpenAI) -> None:
    create = scripted.chat.completions.create
    thought = create(model="m", messages=[USER], tools=[TOOL], stop=["the weather", "days"]).choices[0]
    assert thought.message.reasoning_content == "I need the weather."
    assert thought.message.tool_calls[0].function.arguments == '{"town": "Graz", "'

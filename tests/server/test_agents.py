"""What agents send, through the chat templates of real models: nothing is lost, and a turn goes on where the one before it ended."""

import hashlib
import time

import pytest

from atlas_core.plugins import discover
from atlas_core.plugins.load import load
from atlas_core.server.messages.face import Messages, read
from atlas_core.server.messages.schema import CountRequest
from atlas_core.text.dialect.choice import choose
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.messages import Ready

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
# As Claude Code sends it, in short.
BODY = {
    "system": [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "Section one.", "Section two.")],
    "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
    "tools": [{"name": "Bash", "description": "Run it.", "input_schema": SCHEMA}],
}  # fmt: skip
USER = {"role": "user", "content": [{"type": "text", "text": "Reminder.\n"}, {"type": "text", "text": "Question?"}]}
AROUND = {"role": "system", "content": [{"type": "text", "text": "Surroundings."}]}
CALL = {"type": "tool_use", "id": "toolu_01A", "name": "Bash", "input": {"command": "make"}}
SAID = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Now."}, CALL],
}
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "toolu_01A", "content": "Built.", "is_error": False}],
}
PARTS = [{"type": "text", "text": "Bu"}, {"type": "text", "text": "ilt."}]
IN_PARTS = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_01A", "content": PARTS}]}
LATER = {"role": "system", "content": "News."}
SILENT = ("Llama-3", "Hermes-", "Mistral-")
"""Templates that print no text beside a call."""
MOVES = "Mistral-Nemo"
"""A template that prints the system prompt in the last turn, and only if that is a user's."""
ODD = ("llama-cpp-deepseek-r1", "DeepSeek-R1-Distill", "QwQ")
"""A template for another Jinja, one that prints no calls, and those that open a thought only at the end."""


@pytest.fixture(scope="module")
def speakers(shared, kit):
    """Models by the names of their templates: those that call tools."""
    dialects = {name: load(found.dialect, "atlas_core")() for name, found in discover().dialects.items()}
    found = {}
    for path in sorted((shared / "assets" / "templates" / "llama.cpp-b11434").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        speech = choose(dialects, source)
        if speech.tools is not None and not any(odd in path.name for odd in ODD):
            template = ChatTemplate(source, SPECIAL, strftime=time.strftime)
            found[path.stem] = kit.model(template=template, speech=speech)
    return found


def test_an_agent_in_the_templates_of_many_models(speakers):
    face, seen = Messages(), 0

    def prompt(model, *messages):
        request, _ = read(CountRequest, {**BODY, "messages": list(messages)})
        return bytes(
            token for token in face.prompt(request, model, Ready(1 << 20, 1, 300, "f")).ids if token < 256
        ).decode()

    for name, model in speakers.items():
        first, second = prompt(model, USER, AROUND), prompt(model, USER, AROUND, SAID, RESULT)
        third = prompt(model, USER, AROUND, SAID, RESULT, LATER)
        assert second.startswith(first) or MOVES in name, name
        assert prompt(model, USER, AROUND, SAID, IN_PARTS) == second, name
        wanted = [] if MOVES in name else ["Section one.", "Section two."]
        wanted += ["Reminder.", "Question?", "Surroundings.", "Bash", "make", "Built."]
        wanted += [] if any(silent in name for silent in SILENT) else ["Now."]
        assert [word for word in wanted if word not in second] == [], name
        assert "billing" not in second, name
        assert third.index("News.") > third.index("Built."), name
        seen += 1
    assert seen > 25


@pytest.mark.parametrize("name", ["Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"])
def test_ids_of_calls_that_others_chose(speakers, name):
    model = speakers[name]
    request, _ = read(CountRequest, {**BODY, "messages": [USER, SAID, RESULT]})
    prompt = Messages().prompt(request, model, Ready(1 << 20, 1, 300, "f"))
    text = bytes(token for token in prompt.ids if token < 256).decode()
    assert "toolu_01A" not in text
    assert text.count(hashlib.sha256(b"toolu_01A").hexdigest()[:9]) == 2


CALLS = [{**CALL, "id": f"toolu_{n}", "input": {"command": f"do {n}"}} for n in (1, 2)]
RESULTS = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"did {n}"} for n in (2, 1)]


def test_parallel_calls_in_the_templates_of_many_models(speakers):
    """Llama's have one call at a time."""
    body = {**BODY, "messages": [USER, {"role": "assistant", "content": CALLS}, {"role": "user", "content": RESULTS}]}
    request, _ = read(CountRequest, body)
    for name, model in speakers.items():
        prompt = Messages().prompt(request, model, Ready(1 << 20, 1, 300, "f"))
        text = bytes(token for token in prompt.ids if token < 256).decode()
        assert [word for word in ("do 1", "do 2", "did 1", "did 2") if word not in text] == [], name
    assert not speakers["meta-llama-Llama-3.1-8B-Instruct"].template.abilities.parallel_calls

"""The dialect of a model: by name, by declaration, by template; and the templates of known models."""

import json
import time

import pytest

from atlas_core.text.dialect.choice import choose
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.errors import RequestError, UsageError

SPOKEN = {
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "plain"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "plain"),
    "ibm-granite-granite-4.0": ("hermes", "plain"),
    "Qwen3-Coder": ("qwen3_coder", "plain"),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "MiniMax-M2": ("minimax_xml", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "plain"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "plain"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral_think"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", "plain"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", "plain"),
    "google-gemma-4-31B-it": ("gemma", "gemma"),
    "google-gemma-2-2b-it": ("plain", "plain"),
    "GLM-4.6": ("glm4", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "think"),
    "LFM2.5-8B-A1B": ("pythonic", "think"),
    "ByteDance-Seed-OSS": ("plain", "seed_think"),
    "microsoft-Phi-3.5-mini-instruct": ("plain", "plain"),
}


def names(speech):
    return speech.tool_dialect, speech.reasoning_dialect


@pytest.fixture
def templates(shared):
    (folder,) = (shared / "assets" / "templates").iterdir()
    return folder


@pytest.mark.parametrize("model", SPOKEN)
def test_templates_show_their_dialect(kit, templates, model):
    speech = choose(kit.known, (templates / f"{model}.jinja").read_text())
    assert names(speech) == SPOKEN[model]


def test_no_template_is_claimed_twice(kit, templates):
    paths = sorted(templates.glob("*.jinja"))
    assert len(paths) > 50
    for path in paths:
        choose(kit.known, path.read_text())


def test_who_decides(kit):
    qwen = "<tool_call> <think>"
    assert names(choose(kit.known, qwen)) == ("hermes", "think")
    assert names(choose(kit.known, qwen, tools=("", "mistral"), reasoning=("plain", "gemma"))) == ("mistral", "plain")
    assert names(choose(kit.known, qwen, tools=("glm4", "mistral"))) == ("glm4", "think")
    assert choose(kit.known, "", tools=("mistral",)).tools.call_id_length == 9
    with pytest.raises(UsageError, match="no dialect nonsense for --tool-call-parser"):
        choose(kit.known, qwen, tools=("nonsense",))
    with pytest.raises(UsageError, match="no dialect hermes for --reasoning-parser"):
        choose(kit.known, qwen, reasoning=("hermes",))


def test_the_reasons_are_told(kit):
    calls, thoughts = choose(kit.known, "<tool_call> <think>", tools=("", "mistral")).choices
    assert (calls.name, calls.source, calls.candidates) == ("mistral", "the model's preset or plugin", ())
    assert (thoughts.name, thoughts.source) == ("think", "the chat template")
    refused = {candidate.name: candidate.verdict for candidate in thoughts.candidates if not candidate.verdict.ok}
    assert refused["seed_think"].reasons == ("the template has no <seed:think>",)
    calls, thoughts = choose(kit.known, "", reasoning=("plain",)).choices
    assert (calls.name, calls.source) == ("plain", "the chat template")
    assert (thoughts.name, thoughts.source) == ("plain", "--reasoning-parser")


ROUND_TRIPS = [
    "Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "MiniMax-M2", "GLM-4.6", "google-gemma-4-31B-it", "deepseek-ai-DeepSeek-V3.1",
    "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512", "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ibm-granite-granite-4.0",
]  # fmt: skip
CODE = "    if a < b and b > 0:\n        return \"x\\n\" + '&lt;é😀'\n"


@pytest.mark.parametrize("model", ROUND_TRIPS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("write_file", {"path": "x.py", "content": CODE}),
        ("lookup", {"zip": "00742", "limit": 3, "exact": True, "tags": ["a, b", "}"], "opts": {"deep": False}}),
    ],
)
def test_what_a_template_renders_is_parsed_back(kit, templates, model, name, arguments):
    source = (templates / f"{model}.jinja").read_text()
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, strftime=time.strftime)
    tools = [
        {"type": "function", "function": {"name": tool.name, "description": "d", "parameters": dict(tool.parameters)}}
        for tool in kit.tools
        if tool.name == name
    ]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    user = {"role": "user", "content": "go"}
    asked = template.render([user], tools=tools, add_generation_prompt=True)
    try:
        told = template.render(
            [user, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=tools, add_generation_prompt=False
        )
    except RequestError as refusal:
        pytest.fail(f"the template refuses: {refusal}")
    rest = told.rpartition(asked[-20:])[2]
    answer = kit.read(choose(kit.known, source).tool_dialect, rest)
    assert answer.parsed[-1:] == [{"name": name, "arguments": arguments}]

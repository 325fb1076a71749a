"""A stranger's dialect: chosen by name, its template renders the prompt, its strings end the turn, its parser finds the calls."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from atlas_core.loading.huggingface import HuggingFaceReader
from atlas_core.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
MESSAGES = [{"role": "user", "content": "What is gravity?"}]
RENDERED = "[user] What is gravity?\n[assistant] "
PARSE = """
import json, sys
from atlas_dialect_toy.dialect import ToyDialect
for pieces, cut in json.loads(sys.argv[1]):
    parser = ToyDialect().tools.parser(())
    events = [event for piece in pieces for event in parser.push(piece)] + list(parser.finish(cut=cut))
    kinds = [type(event).__name__ for event in events]
    said = "".join(getattr(event, "text", "") or getattr(event, "name", "") for event in events)
    print(json.dumps([list(dict.fromkeys(kinds)), said]))
"""


@pytest.fixture
def spoken(dialects, tmp_path):
    """A copy of the installed dialect that a test may change."""
    return dialects.moved(tmp_path / "site")


@contextmanager
def serving(site, log, *flags):
    """The URL of a server in which the site's packages are installed."""
    command = [sys.executable, "-m", "atlas_core", "serve", str(TINY), "--hw", "cpu", "--port", "0", *flags]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ATLAS_", "PYTHON"))}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**kept, "PYTHONPATH": str(site.folder)}
        )  # fmt: skip
    try:
        for _ in range(600):
            found = re.search(r"^ready: (\S+)/v1", log.read_text(), re.MULTILINE)
            if found:
                break
            assert process.poll() is None, log.read_text()
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert found, log.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def chat(url):
    body = {"model": "x", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        return json.load(response)


def rendered_tokens():
    checkpoint = HuggingFaceReader().open(TINY)
    try:
        return len(Tokenizer(checkpoint.tokenizer()).encode(RENDERED))
    finally:
        checkpoint.close()


def test_its_template_and_its_stop_are_served(spoken, tmp_path):
    flags = ("--tool-call-parser", "toy", "--served-model-name", "x")
    with serving(spoken, tmp_path / "log", *flags) as url:
        free = chat(url)
    assert free["usage"]["prompt_tokens"] == rendered_tokens()
    text = free["choices"][0]["message"]["content"]
    assert free["choices"][0]["finish_reason"] == "length"
    end = text[len(text) // 2 : len(text) // 2 + 2]
    path = spoken.folder / "atlas_dialect_toy" / "dialect.py"
    path.write_text(path.read_text().replace('("\\n[",)', f"({end!r},)"))
    with serving(spoken, tmp_path / "log", *flags) as url:
        stopped = chat(url)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(end)]


def test_without_being_asked_for_it_says_nothing(dialects, tmp_path):
    with serving(dialects, tmp_path / "log", "--served-model-name", "x") as url:
        assert chat(url)["usage"]["prompt_tokens"] != rendered_tokens()


def test_its_parser_does_not_depend_on_how_the_text_was_cut(dialects):
    call = '!add {"a": 1}'
    cases = [([call], False), (list(call), False), ([call[:8]], True), (["so ", "!x y"], False), (["!add"], False)]
    said = dialects.run("-c", PARSE, json.dumps(cases))
    assert said.code == 0, said.text
    whole = [["CallBegin", "CallArguments", "CallEnd"], 'add{"a": 1}']
    open_call = [["CallBegin", "CallArguments"], 'add{"a']
    assert list(map(json.loads, said.text.splitlines())) == [
        whole, whole, open_call, [["Text"], "so !x y"], [["Text"], "!add"],
    ]  # fmt: skip


def test_a_name_that_nobody_has_is_refused(dialects):
    said = dialects.run(
        "-m", "atlas_core", "serve", str(TINY), "--hw", "cpu", "--port", "0", "--tool-call-parser", "toys"
    )
    assert said.code == 2, said.text
    assert "there is no dialect toys for --tool-call-parser" in said.text
    assert re.search(r"why: .*\btoy\b", said.text)

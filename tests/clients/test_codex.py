"""The Codex CLI, in an exchange of several turns with its own shell."""

import sys

import pytest
from scripted_model import turn

SCRIPTS = {
    "notes": [
        turn("Let me look.", thought="Two files.", calls=[("exec_command", {"cmd": f"cat {name}"}) for name in "ab"]),
        turn(thought="A sum.", calls=[("exec_command", {"cmd": "echo 42 > sum; cat sum"})]),
        turn("They add up to ☀ 42."),
    ],
    "tools": [turn(calls=[("mcp__notes__get_note", {"name": "a"})]), turn("It says ☀.")],
}
CONFIG = """
model = "scripted"
model_provider = "atlas"
check_for_update_on_startup = false
[model_providers.atlas]
name = "Atlas"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""


MCP = """
[mcp_servers.notes]
command = "{python}"
args = ["{path}"]
"""
MCP_SERVER = """
import json, sys
schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answers = {
        "initialize": {
            "protocolVersion": asked.get("params", {}).get("protocolVersion"), "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "get_note", "description": "A note.", "inputSchema": schema}]},
        "tools/call": {"content": [{"type": "text", "text": "note of " + str(asked.get("params", {}).get("arguments"))}]},
    }
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers.get(asked["method"], {})}), flush=True)
"""


@pytest.fixture(scope="module")
def server(play):
    return play(SCRIPTS)


@pytest.fixture
def codex(server, npm_client, run_client):
    """``codex(prompt, more configuration)``: what it printed."""
    program = npm_client("codex")
    home = run_client.home / ".codex"
    home.mkdir()

    def run(prompt, more=""):
        (home / "config.toml").write_text(CONFIG.format(url=server.url) + more)
        return run_client(
            program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt, CODEX_HOME=str(home)
        )  # fmt: skip

    return run


def test_its_shell(server, codex, run_client):
    for name, text in (("a", "sun 40\n"), ("b", "rain 2\n")):
        (run_client.folder / name).write_text(text)
    before = len(server.conversations)
    said = codex("play notes")
    assert said == "They add up to ☀ 42.\n"
    assert (run_client.folder / "sum").read_text() == "42\n"
    assert len(server.conversations) == before + 3
    assert {path for _, path, _, _ in server.requests} == {"/health", "/v1/responses"}
    messages = server.conversations[-1]["messages"]
    asked = next(place for place, message in enumerate(messages) if message["content"] == "play notes")
    roles = ["assistant", "tool", "tool", "assistant", "tool"]
    assert [message["role"] for message in messages] == ["system", *["user"] * asked, *roles]
    first, one, two, second, last = messages[asked + 1 :]
    assert (first["content"], first["reasoning_content"]) == ("Let me look.", "Two files.")
    assert [call["function"]["arguments"] for call in first["tool_calls"]] == [{"cmd": "cat a"}, {"cmd": "cat b"}]
    assert [message["tool_call_id"] for message in (one, two)] == [call["id"] for call in first["tool_calls"]]
    assert ("sun 40" in one["content"], "rain 2" in two["content"], "42" in last["content"]) == (True, True, True)
    assert second["reasoning_content"] == "A sum."
    names = {tool["function"]["name"] for tool in server.conversations[-1]["tools"]}
    assert "exec_command" in names


def test_tools_of_others(server, codex, run_client):
    path = run_client.home / "notes.py"
    path.write_text(MCP_SERVER)
    assert codex("play tools", MCP.format(python=sys.executable, path=path)) == "It says ☀.\n"
    messages = server.conversations[-1]["messages"]
    assert messages[-2]["tool_calls"][0]["function"] == {"name": "mcp__notes__get_note", "arguments": {"name": "a"}}
    assert (messages[-1]["role"], "note of {'name': 'a'}" in messages[-1]["content"]) == ("tool", True)

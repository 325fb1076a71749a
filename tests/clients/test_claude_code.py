"""Claude Code without a terminal: its own tool is called, and the result comes back to the model."""

import json

import pytest
from scripted_model import turn

COMMAND = "echo written > made.txt && echo done: $((40 + 2))"
SCRIPTS = {
    "shell": [
        turn("I run it.", thought="A command will do.", calls=[("Bash", {"command": COMMAND, "description": "Count"})]),
        turn("The command said done."),
    ]
}
QUIET = {
    "ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": "scripted", "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
    "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(play):
    return play(SCRIPTS)


def test_a_tool_is_called_and_its_result_comes_back(server, npm_client, run_client):
    said = run_client(
        npm_client("claude"), "-p", "play shell", "--dangerously-skip-permissions", "--output-format", "json",
        ANTHROPIC_BASE_URL=server.url, **QUIET,
    )  # fmt: skip
    result = json.loads(said)
    assert (result["subtype"], result["result"], result["num_turns"]) == ("success", "The command said done.", 2)
    assert (run_client.folder / "made.txt").read_text() == "written\n"
    first, second = server.conversations
    (result,) = [message for message in second["messages"] if message["role"] == "tool"]
    (before,) = [message for message in second["messages"] if message["role"] == "assistant"]
    assert result["content"] == "done: 42"
    assert result["tool_call_id"] == before["tool_calls"][0]["id"]
    assert (before["content"], before["reasoning_content"]) == ("I run it.", "A command will do.")
    assert before["tool_calls"][0]["function"] == {
        "name": "Bash",
        "arguments": {"command": COMMAND, "description": "Count"},
    }
    assert [message["role"] for message in second["messages"]] == ["system", "user", "system", "assistant", "tool"]
    assert second["messages"][:3] == first["messages"], "the second turn must find the prompt of the first in the cache"
    assert "billing" not in first["messages"][0]["content"]
    assert "Bash" in [tool["function"]["name"] for tool in first["tools"]]

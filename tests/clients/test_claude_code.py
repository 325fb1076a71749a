"""Claude Code without a terminal: its own tool is called, and the result comes back to the model."""

import json

import pytest
from scripted_model import turn

COMMAND = "echo written > made.txt && echo done: $((40 + 2))"
FAILING = "echo no such thing >&2; exit 3"
SCRIPTS = {
    "shell": [
        turn("I run it.", thought="A command will do.", calls=[("Bash", {"command": COMMAND, "description": "Count"})]),
        turn(calls=[("Read", {"file_path": "made.txt"}), ("Bash", {"command": FAILING, "description": "Fail"})]),
        turn("The command said done. ☀"),
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


def test_tools_are_called_and_their_results_come_back(server, npm_client, run_client):
    said = run_client(
        npm_client("claude"), "-p", "play shell", "--dangerously-skip-permissions", "--output-format", "json",
        ANTHROPIC_BASE_URL=server.url, **QUIET,
    )  # fmt: skip
    result = json.loads(said)
    assert (result["subtype"], result["result"]) == ("success", "The command said done. ☀")
    assert (run_client.folder / "made.txt").read_text() == "written\n"
    first, second, third = (conversation["messages"] for conversation in server.conversations)
    assert [message["role"] for message in second] == ["system", "user", "system", "assistant", "tool"]
    *_, before, result = second
    assert result["content"] == "done: 42"
    assert result["tool_call_id"] == before["tool_calls"][0]["id"]
    assert (before["content"], before["reasoning_content"]) == ("I run it.", "A command will do.")
    assert before["tool_calls"][0]["function"] == {
        "name": "Bash",
        "arguments": {"command": COMMAND, "description": "Count"},
    }
    assert [message["role"] for message in third] == [
        *(message["role"] for message in second),
        "assistant",
        "tool",
        "tool",
    ]
    *_, before, read, failed = third
    assert [call["function"]["name"] for call in before["tool_calls"]] == ["Read", "Bash"]
    assert "written" in read["content"]
    assert failed["content"].startswith("Error: ")
    assert "no such thing" in failed["content"]
    assert second[:3] == first[:3], "the second turn must find the prompt of the first in the cache"
    assert third[:5] == second, "and the third that of the second"
    assert "billing" not in first[0]["content"]
    assert {"Bash", "Read"} <= {tool["function"]["name"] for tool in server.conversations[0]["tools"]}

"""The Codex CLI, in an exchange of several turns with its own shell."""

from scripted_model import turn

SCRIPTS = {
    "notes": [
        turn("Let me look.", thought="Two files.", calls=[("exec_command", {"cmd": f"cat {name}"}) for name in "ab"]),
        turn(thought="A sum.", calls=[("exec_command", {"cmd": "echo 42 > sum; cat sum"})]),
        turn("They add up to ☀ 42."),
    ]
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


def test_codex(play, npm_client, run_client):
    codex = npm_client("codex")
    server = play(SCRIPTS)
    for name, text in (("a", "sun 40\n"), ("b", "rain 2\n")):
        (run_client.folder / name).write_text(text)
    home = run_client.home / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=server.url))
    said = run_client(
        codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "play notes",
        CODEX_HOME=str(home),
    )  # fmt: skip
    assert said == "They add up to ☀ 42.\n"
    assert (run_client.folder / "sum").read_text() == "42\n"
    assert len(server.conversations) == 3
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

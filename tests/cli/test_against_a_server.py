"""``atlas chat`` and ``atlas bench`` against a running server."""

import json

KEY = {"ATLAS_API_KEY": "secret,another"}
SHORT = ("--temperature", "0", "--max-tokens", "6")


def test_a_piped_prompt_gets_an_answer(atlas, server):
    first = atlas("chat", "--url", server, *SHORT, typed="hello there\n", **KEY)
    again = atlas("chat", "tiny", "--url", f"{server}/v1", *SHORT, "--api-key", "secret", typed="hello there")
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert first.out == again.out
    assert first.out.strip()
    assert first.err == "(cut off: it reached the most tokens allowed)\n"
    other = atlas("chat", "--url", server, *SHORT, "--system", "be brief", typed="hello there", **KEY)
    assert other.out != first.out


def test_a_key_that_is_missing(atlas, server):
    said = atlas("chat", "--url", server, typed="hello")
    said.expect(10, "answered 401", "ATLAS_API_KEY")


def test_options_of_an_engine_do_not_go_with_a_server(atlas, server):
    atlas("chat", "--url", server, "--threads", "2", typed="hello").expect(2, "--threads does not go with --url")


def test_bench_counts_every_token(atlas, server):
    sizes = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "9", "--max-tokens", "5", "--ignore-eos")
    said = atlas("bench", "serve", "--url", server, *sizes, "--json", **KEY)
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert (found["requests"], found["succeeded"], found["errors"], found["counted"]) == (6, 6, {}, True)
    assert found["completion_tokens"] == 30
    assert found["workload"]["model"] == "tiny"
    assert found["inter_token_ms"]["count"] <= 24
    assert 0 < found["ttft_ms"]["p50"] <= found["end_to_end_ms"]["p50"] <= found["end_to_end_ms"]["largest"]
    assert found["output_tokens_per_second"] > 0


def test_bench_of_chats_at_a_rate_as_a_table(atlas, server):
    sizes = (
        "--requests",
        "4",
        "--rate",
        "50",
        "--prompt-tokens",
        "9",
        "--max-tokens",
        "3",
        "--endpoint",
        "chat",
        "--ignore-eos",
    )
    said = atlas("bench", "serve", "--url", server, *sizes, **KEY)
    assert said.code == 0, said.err
    assert "requests      4 of 4 answered" in said.out
    assert "12 of answers" in said.out
    assert "time to first token" in said.out


def test_bench_of_requests_that_fail(atlas, server):
    said = atlas("bench", "serve", "--url", server, "--requests", "2", "--model", "tiny", "--api-key", "wrong")
    said.expect(9, "none of 2 requests was answered", "answered 401")

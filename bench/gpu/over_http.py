"""A running server as clients see it: a streamed chat, tokens a second of one and of eight clients, and a step that mixes both phases.

    atlas serve MODEL --hardware hopper ... & python bench/gpu/over_http.py http://127.0.0.1:8888

The rates count the tokens behind the first of each stream, over the time from the first token of all streams to the last. For the mixed
step a second request arrives while the first one streams; both texts must be what the server says to each request alone. Exits 1 when not.
"""

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

WAIT = 120.0
QUESTION = "Write a long story about a lighthouse keeper and the sea."
OTHER = (
    "Here are some words: "
    + "river stone cloud lantern harbour winter copper garden " * 12
    + "Which of them is a season?"
)


@dataclass(slots=True)
class Stream:
    """What one client received: text pieces, the time of each token, the server's usage."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    tokens: int = 0


def get(url: str) -> str:
    """The body of a GET."""
    with urllib.request.urlopen(url, timeout=WAIT) as answer:
        return str(answer.read().decode())


def events(url: str, body: dict[str, object]) -> Iterator[dict[str, object]]:
    """Server-sent events of one POST."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


def chat(base: str, question: str, tokens: int, *, on_token: Callable[[int], None] = lambda count: None) -> Stream:
    """One greedy streamed chat of up to ``tokens`` tokens."""
    body = {
        "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    stream = Stream()
    for event in events(f"{base}/v1/chat/completions", body):
        if usage := event.get("usage"):
            stream.tokens = usage["completion_tokens"]  # type: ignore[index]
        for choice in event.get("choices", ()):  # type: ignore[attr-defined]
            if piece := choice["delta"].get("content"):
                stream.text += piece
                stream.times.append(time.perf_counter())
                on_token(len(stream.times))
    return stream


def rate(base: str, clients: int, tokens: int) -> float:
    """Tokens a second of so many clients at once."""
    streams: list[Stream] = []
    threads = [
        threading.Thread(target=lambda i=i: streams.append(chat(base, f"{QUESTION} Chapter {i}.", tokens)))
        for i in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(streams) != clients:
        raise SystemExit(f"{clients - len(streams)} of {clients} clients got no answer")
    began, ended = min(s.times[0] for s in streams), max(s.times[-1] for s in streams)
    return sum(s.tokens - 1 for s in streams) / (ended - began)


def main(base: str) -> int:
    """Wait until the server is ready, then ask; the exit status tells whether the mixed step held."""
    began = time.perf_counter()
    while True:
        try:
            get(f"{base}/health")
            break
        except OSError:
            if time.perf_counter() - began > WAIT:
                raise
            time.sleep(0.2)
    print(f"ready after {time.perf_counter() - began:.1f} s")
    story, answer = chat(base, QUESTION, 300), chat(base, OTHER, 40)
    print(f"chat: {story.tokens} tokens in {len(story.times)} events: {story.text[:150]!r}")
    for clients in (1, 8):
        print(f"{clients} clients: {rate(base, clients, 300):.0f} tok/s")
    found: list[Stream] = []
    second = threading.Thread(target=lambda: found.append(chat(base, OTHER, 40)))
    first = chat(base, QUESTION, 300, on_token=lambda count: second.start() if count == 20 else None)
    second.join()
    same = first.text == story.text and found[0].text == answer.text
    inside = first.times[0] < found[0].times[0] < first.times[-1]
    print(f"a prompt read while another request decodes: texts equal to alone: {same}; overlapped: {inside}")
    return 0 if same and inside else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""A model that plays a script, for real clients: an engine of its own process, in which only the device is made up.

Tokens are bytes, and the chat template prints the conversation as JSON. So the device can read what it was asked: the last message
of a user that says ``play NAME`` chooses the script, and the turns of the assistant since then are the place in it.
"""

import json
import re
import time

from atlas_core.engine.loop import Engine, StepOutput
from atlas_core.ops.step import SlotLayout
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.text.detokenize import Detokenizer
from atlas_core.vocab.messages import Progress, Ready

END, VOCAB = 256, 257
TEMPLATE = '{{ {"messages": messages, "tools": tools} | tojson }}'
CONTEXT, PAGE, SLOTS = 1 << 19, 256, 4
LIMITS = Limits(
    SlotLayout(SLOTS, (CONTEXT // PAGE,), 16), PAGE, (SLOTS * CONTEXT // PAGE,), VOCAB, CONTEXT, 1 << 16, SLOTS, 64
)


def turn(text="", *, thought="", calls=()):
    """One answer, as a model of the Hermes dialect writes it; ``calls`` are (name, arguments)."""
    written = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text + written


def answer(prompt, scripts):
    """What the model says to ``prompt``."""
    messages = json.loads(prompt)["messages"]
    asked = [
        (index, name)
        for index, message in enumerate(messages)
        if message["role"] == "user"
        for name in re.findall(r"\bplay (\w+)", message["content"])
    ]
    if not asked:
        return "Nothing is to be played."
    place, name = asked[-1]
    script = scripts.get(name, ())
    number = sum(message["role"] == "assistant" for message in messages[place:])
    return script[number] if number < len(script) else f"The script {name} has no turn {number}."


class Tokenizer:
    """Bytes, and one token that ends a turn."""

    special_ids = frozenset({END})
    special_tokens = frozenset({"<end>"})

    def encode(self, text, *, add_special=True, parse_special=True):
        parts = text.split("<end>") if parse_special else [text]
        ids = list(parts[0].encode())
        for part in parts[1:]:
            ids += [END, *part.encode()]
        return ids

    def decode(self, ids, *, skip_special=True):
        return b"".join(_spelling(token, skip=skip_special) for token in ids).decode(errors="replace")

    def token_bytes(self, token):
        return _spelling(token, skip=False)

    def detokenizer(self, *, skip_special=True, shown=()):
        return Detokenizer(lambda token: _spelling(token, skip=skip_special and token not in shown))


def _spelling(token, *, skip):
    if token < END:
        return bytes([token])
    return b"" if skip else b"<end>"


class Player:
    """A StepRunner whose tokens are those of the script; every step takes ``delay`` seconds."""

    asynchronous = False

    def __init__(self, scripts, delay):
        self._scripts = scripts
        self._delay = delay
        self._answers = {}

    def launch(self, plan):
        return [self._next(plan.sequences[row]) for row in plan.sample_row]

    def kind(self, ticket):
        return None

    def wait(self, ticket):
        pass

    def collect(self, ticket):
        time.sleep(self._delay)
        return StepOutput(ticket)

    def close(self):
        pass

    def _next(self, sequence):
        prompt, said = sequence.tokens[: sequence.prompt_length], len(sequence.tokens) - sequence.prompt_length
        if sequence.id not in self._answers:
            self._answers[sequence.id] = answer(Tokenizer().decode(prompt), self._scripts).encode()
        tokens = self._answers[sequence.id]
        return tokens[said] if said < len(tokens) else END


def build(settings, report):
    """An engine.serving.Build; ``settings`` is JSON with ``scripts``, a list of answers by name, and ``delay``."""
    chosen = json.loads(settings)
    report(Progress("scripts", 1, 1))
    return Engine(
        runner=Player(chosen["scripts"], chosen["delay"]), scheduler=Scheduler(LIMITS), text=Tokenizer(), eos=(END,),
        info=Ready(CONTEXT, SLOTS, VOCAB, "scripted"),
    )  # fmt: skip

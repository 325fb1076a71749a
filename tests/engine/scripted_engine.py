"""An engine whose device is tests/scheduler/scripted.py, and whose words are made up."""

import json
import time

from msgspec.structs import replace
from scripted import VOCAB, ScriptedDevice, oracle

from atlas_core.engine.loop import Engine, StepOutput
from atlas_core.engine.output import Alternatives
from atlas_core.ops.step import SlotLayout
from atlas_core.scheduler.limits import Limits
from atlas_core.scheduler.scheduler import Scheduler
from atlas_core.text.detokenize import Detokenizer
from atlas_core.vocab.errors import BudgetError, DeviceError
from atlas_core.vocab.messages import Progress, Ready
from atlas_core.vocab.sampling import SamplingParams

EOS = VOCAB - 1
LIMITS = Limits(SlotLayout(4, (16,), 12), 4, (24,), VOCAB, 64, 6, 2, 100)
INFO = Ready(64, 4, VOCAB, "scripted")
SPELLINGS = [
    *(bytes([97 + i]) for i in range(26)), b"\xf0\x9f", b"\x98\x80", b" ", "é".encode(), b"\xc3", b"\xa9", b"the",
    b"he ",
    b"ab", b"ba", b"aba", b"\n", b"\xff", b"", "語".encode(), b".", b"stop", b"st", b"op", b"<a>", b"<b>", b"no", b"on",
    b"</s>",
]  # fmt: skip


class ScriptedText:
    """Token ids to bytes; the last id is special."""

    def token_bytes(self, token):
        return SPELLINGS[token]

    def detokenizer(self, *, skip_special=True, shown=()):
        return Detokenizer(
            lambda token: b"" if skip_special and token == EOS and token not in shown else SPELLINGS[token]
        )


class ScriptedRunner:
    """StepRunner over the scripted device. ``delay`` seconds pass in every step; step ``fail_at`` loses the device.

    With ``defect`` it meets a defect of Atlas instead.
    """

    def __init__(self, limits, *, asynchronous=False, delay=0.0, fail_at=None, defect=False):
        self.device = ScriptedDevice(limits)
        self.asynchronous = asynchronous
        self.closed = False
        self._delay = delay
        self._fail_at = fail_at
        self._defect = defect

    def launch(self, plan):
        if self.device.steps == self._fail_at:
            if self._defect:
                raise ZeroDivisionError("the test said so")
            raise DeviceError("the device is lost", "the test said so", sticky=True)
        sampled = self.device.run(plan)
        if not plan.logprobs:
            return sampled, None
        given = {scored.place: alternatives(scored.token, scored.alternatives) for scored in plan.scored}
        rows = enumerate(zip(plan.sample_row, sampled, strict=True))
        return sampled, [
            given.get(place) or alternatives(token, plan.sequences[row].fields[15]) for place, (row, token) in rows
        ]

    def kind(self, ticket):
        return None

    def wait(self, ticket):
        pass

    def collect(self, ticket):
        time.sleep(self._delay)
        return StepOutput(*ticket)

    def close(self):
        self.closed = True


def alternatives(token, wanted):
    """The sampled token first, then the tokens before it, each half as likely."""
    if wanted < 0:
        return Alternatives([-1], [0.0])
    ids = [token, *((token - i) % VOCAB for i in range(wanted))]
    return Alternatives(ids, [-0.5, *(-0.5 * (i + 1) for i in range(wanted))])


def make_engine(limits=LIMITS, runner=None, **options):
    return Engine(
        runner=runner or ScriptedRunner(limits, **options), scheduler=Scheduler(limits), text=ScriptedText(),
        eos=(EOS,), info=replace(INFO, max_seq_len=limits.max_seq_len),
    )  # fmt: skip


def build(settings, report):
    """A serving.Build: ``settings`` is JSON of ScriptedRunner's options; ``broken`` makes it fail."""
    options = json.loads(settings or b"{}")
    report(Progress("weights", 1, 2))
    if options.pop("broken", False):
        raise BudgetError("it does not fit", "the test said so", "buy memory")
    time.sleep(options.pop("load", 0.0))
    report(Progress("weights", 2, 2, "done"))
    return make_engine(**options)


def expected(request, limits=LIMITS):
    """(tokens, text, finish, stop) of a request with a seed, decided from the whole list of its tokens."""
    params: SamplingParams = request.sampling
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
    tokens = oracle(request, params.seed & (2**64 - 1), stop_ids, limits.max_seq_len)
    detokenizer = ScriptedText().detokenizer(skip_special=params.skip_special_tokens)
    text = ""
    start = 0
    for count, token in enumerate(tokens, 1):
        ended = token in stop_ids
        text += "" if ended and not params.include_stop_in_output else detokenizer.push(token)
        last = count == len(tokens)
        whole = text + (detokenizer.finish() if last else "")
        if count <= params.min_tokens:
            start = len(whole)
        hits = sorted((whole.find(s, start) + len(s), -len(s), s) for s in params.stop if whole.find(s, start) >= 0)
        if hits:
            end, _, stop = hits[0]
            shown = whole[:end] if params.include_stop_in_output else whole[: end - len(stop)]
            return tokens[:count], shown, "stop", stop
        if last:
            return tokens, whole, "stop" if ended else "length", str(token) if ended else None
    raise AssertionError("a request has at least one token")


assert len(SPELLINGS) == VOCAB


def prepare(early):
    """What ``build`` needs, at hand."""
    return build


def unprepared(early):
    """Cannot."""
    raise BudgetError("there is no room to prepare", "the test said so", "make room")

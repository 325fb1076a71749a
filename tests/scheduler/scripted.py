"""A device on paper: it does with a StepPlan what step_begin, kv_append and advance do (ops.references), on plain lists.

The next token is a hash of what the sequence's *pages* hold, its seed, position, penalty counts and bias; so a wrong block
table, a page given away too early, a stale slot word or a token fed twice changes the text. `oracle` knows nothing of all that.
"""

import hashlib
import struct
from collections import Counter
from itertools import pairwise

from atlas_core.ops.step import Word

VOCAB = 50
POISON = -(10**6)


def choose(context, seed, position, counts, bias, prompt_length, temperature):
    """The next token after ``context``."""
    forbidden = {token for token, value in bias if value == float("-inf")}
    boosts = sorted((token, value) for token, value in bias if value != float("-inf"))
    text = repr((list(context), seed, position, sorted(counts.items()), boosts, prompt_length, temperature))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def penalty_counts(tokens, prompt_length):
    """What a penalty row holds after ``tokens``: ("p", token) for the prompt's, counts of generated ones."""
    counts = Counter()
    for position, token in enumerate(tokens):
        if position < prompt_length:
            counts["p", token] = 1
        else:
            counts["g", token] += 1
    return counts


def oracle(request, seed, stop_ids, max_seq_len):
    """Every token that the request generates, computed alone, up to its limit or the first stop id."""
    params = request.sampling
    tokens = list(request.prompt)
    limit = max_seq_len - len(tokens)
    limit = min(limit, params.max_tokens or limit)
    out = []
    while len(out) < limit:
        bias = [(token, float32(value)) for token, value in params.logit_bias]
        if len(out) < params.min_tokens:
            bias += [(token, float("-inf")) for token in sorted(set(stop_ids))]
        counts = penalty_counts(tokens, len(request.prompt)) if params.penalised else Counter()
        token = choose(tokens, seed, len(tokens), counts, bias, len(request.prompt), float32(params.temperature))
        out.append(token)
        tokens.append(token)
        if token in stop_ids:
            break
    return out


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _float(word):
    return struct.unpack("<f", struct.pack("<i", word))[0]


class ScriptedDevice:
    """Runs plans; ``run`` returns the sampled tokens of the plan's logits rows."""

    def __init__(self, limits):
        self.limits = limits
        self.layout = limits.layout
        self.slots = [POISON] * self.layout.words
        self.pages = [[[POISON] * limits.page_tokens for _ in range(count)] for count in limits.pages]
        self.written = {}  # (group, page, place) -> (step, slot)
        self.states = [POISON] * limits.places  # the tokens that each stands for
        self.penalty = {row: Counter({"stale": 1}) for row in range(limits.penalty_rows)}
        self.steps = 0
        self.tokens = 0

    def run(self, plan):
        self._check(plan)
        self.steps += 1
        self.tokens += len(plan.token_ids)
        for row in plan.clear_penalty:
            self.penalty[row] = Counter()
        for row, prompt, generated in plan.counted:
            self.penalty[row] = Counter({("p", token): 1 for token in prompt}) + Counter(
                ("g", token) for token in generated
            )
        for word, value in plan.updates:
            assert -(2**31) <= value < 2**31
            self.slots[word] = value
        self._recur(plan)
        for row, slot in enumerate(plan.row_slot):
            for offset, index in enumerate(range(plan.cu_q[row], plan.cu_q[row + 1])):
                self._append(slot, offset, plan.token_ids[index])
        sampled = [
            -1 if row < 0 else self._sample(plan.row_slot[row], plan.cu_q[row + 1] - plan.cu_q[row])
            for row in plan.sample_row
        ]
        for row, token in zip(plan.sample_row, sampled, strict=True):
            if row < 0:
                continue
            self._set(plan.row_slot[row], Word.LAST_TOKEN, token)
        for row, slot in enumerate(plan.row_slot):
            self._set(slot, Word.POSITION, self._get(slot, Word.POSITION) + plan.cu_q[row + 1] - plan.cu_q[row])
        return sampled

    def _recur(self, plan):
        """Rows read and write their states, which no other row of the step may touch, but to read what nobody writes."""
        after = {}
        for row, slot in enumerate(plan.row_slot):
            given = plan.token_ids[plan.cu_q[row] : plan.cu_q[row + 1]]
            tokens = [self._get(slot, Word.LAST_TOKEN) if token < 0 else token for token in given]
            place = self._get(slot, Word.STATE_IN)
            before = self.states[place] if self._get(slot, Word.POSITION) and self.states[place] != POISON else []
            written = self._get(slot, Word.STATE_OUT)
            assert written not in after, "a place is written once"
            after[written] = before + tokens
            others = [other for other in plan.row_slot if other != slot and self._get(other, Word.POSITION)]
            assert written not in [self._get(other, Word.STATE_IN) for other in others], "nobody reads what is written"
        for place, tokens in after.items():
            self.states[place] = tokens

    def _check(self, plan):
        limits = self.limits
        lengths = [end - start for start, end in pairwise(plan.cu_q)]
        assert len(set(plan.row_slot)) == len(plan.row_slot) == len(lengths) == len(plan.sequences)
        assert min(lengths) >= 1
        assert max(lengths) == plan.max_query
        assert plan.cu_q[-1] == len(plan.token_ids) <= limits.max_step_tokens
        assert sum(token >= 0 for token in plan.token_ids) <= limits.max_prefill_tokens
        fed_back = sum(token < 0 for token in plan.token_ids)
        assert sum(token >= 0 for token in plan.token_ids) <= limits.prompt_tokens(fed_back)
        assert len(plan.updates) <= limits.max_updates
        assert len(plan.logits_rows) <= limits.layout.slots
        scored = {one.place: one for one in plan.scored}
        for place, (index, row) in enumerate(zip(plan.logits_rows, plan.sample_row, strict=True)):
            assert (row < 0) is (place in scored)
            assert row < 0 or index == plan.cu_q[row + 1] - 1
            if row < 0 and index + 1 < len(plan.token_ids) and index + 1 not in plan.cu_q:
                assert plan.token_ids[index + 1] == scored[place].token, "asked for is the token that comes next"

    def _get(self, slot, word):
        value = self.slots[self.layout.word(slot, word)]
        assert value != POISON, f"{word.name} of slot {slot} was never written"
        return value

    def _set(self, slot, word, value):
        self.slots[self.layout.word(slot, word)] = value

    def _place(self, slot, group, position):
        page = self.slots[self.layout.block(slot, group, position // self.limits.page_tokens)]
        assert page != POISON, f"position {position} of slot {slot} has no page"
        return page, position % self.limits.page_tokens

    def _append(self, slot, offset, given):
        token = self._get(slot, Word.LAST_TOKEN) if given < 0 else given
        position = self._get(slot, Word.POSITION) + offset
        for group in range(len(self.pages)):
            page, place = self._place(slot, group, position)
            self.pages[group][page][place] = token
            self.written[group, page, place] = self.steps, slot
        row = self._get(slot, Word.PENALTY_ROW)
        if row >= 0:
            if position < self._get(slot, Word.PROMPT_LENGTH):
                self.penalty[row]["p", token] = 1
            else:
                self.penalty[row]["g", token] += 1

    def _sample(self, slot, count):
        end = self._get(slot, Word.POSITION) + count
        contexts = []
        for group in range(len(self.pages)):
            places = [self._place(slot, group, position) for position in range(end)]
            contexts.append([self.pages[group][page][place] for page, place in places])
            # Rows of one step do not see one another: what is shared was computed before.
            assert all(step < self.steps or who == slot for step, who in (self.written[group, *at] for at in places))
        assert all(context == contexts[0] for context in contexts)
        # With a prefix cache and no snapshots there are no layers with states.
        if self.limits.snapshots or not self.limits.prefix_cache:
            assert self.states[self._get(slot, Word.STATE_OUT)] == contexts[0]
        row = self._get(slot, Word.PENALTY_ROW)
        counts = self.penalty[row] if row >= 0 else Counter()
        start = self.layout.bias_start + 2 * self._get(slot, Word.BIAS_START)
        words = self.slots[start : start + 2 * self._get(slot, Word.BIAS_COUNT)]
        bias = [(token, _float(bits)) for token, bits in zip(words[::2], words[1::2], strict=True)]
        low, high = (self._get(slot, word) & 0xFFFFFFFF for word in (Word.SEED_LOW, Word.SEED_HIGH))
        temperature = _float(self._get(slot, Word.TEMPERATURE))
        prompt = self._get(slot, Word.PROMPT_LENGTH)
        return choose(contexts[0], low | high << 32, end, counts, bias, prompt, temperature)

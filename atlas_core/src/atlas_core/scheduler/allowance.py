"""How much of prompts a step takes, so that steps beside decodes take equally long."""

from atlas_core.scheduler.limits import Limits


class Allowance:
    """What is left for prompts in a step with ``decodes`` tokens of running sequences.

    Beside decodes a step costs what its products do and, for each prompt token, its context / ``Limits.even_context``, all of it in
    tokens without a context; ``Limits.max_mixed_tokens`` is the most. Kernels take tokens in tiles, so products cost one amount up to
    each size of ``Limits.mixed_steps``. A prompt that does not fit gets as much as makes the most tokens for what products cost: it fills
    a size, or leaves a part of it empty where attention would take too long, or falls back to a smaller one. It is a step's last.
    Integers alone, so that the same requests are cut alike everywhere.
    """

    def __init__(self, limits: Limits, decodes: int) -> None:
        mixed = decodes > 0 and limits.max_mixed_tokens is not None
        even = limits.even_context if mixed else None
        self._sizes = limits.mixed_steps if mixed else ()
        self._unit, self._attends = (1, False) if even is None else (even, True)
        self._left = limits.prompt_tokens(decodes)
        self._tokens, self._taken, self._cut = decodes, 0, False
        self._budget = (decodes + self._left) * self._unit

    def __bool__(self) -> bool:
        """Whether a further prompt gets a token at least."""
        if self._cut or not self._left:
            return False
        return not self._taken or self._products(self._tokens + 1) * self._unit < self._budget

    def take(self, wanted: int, context: int) -> int:
        """Tokens that a prompt gets of ``wanted`` (one or more) behind ``context`` positions: one at least, if there are any left."""
        each, most = context if self._attends else 0, min(wanted, self._left)
        count = most
        if most < wanted or self._products(self._tokens + most) * self._unit + most * each > self._budget:
            count = self._best(most, each)
        self._cut = count < wanted
        self._tokens += count
        self._taken += count
        self._left -= count
        self._budget -= count * each
        return count

    def _products(self, tokens: int) -> int:
        """What products of so many tokens cost."""
        for size, cost in self._sizes:
            if tokens <= size:
                return cost
        size, cost = self._sizes[-1] if self._sizes else (0, 0)
        return cost + tokens - size

    def _best(self, most: int, each: int) -> int:
        """Of the counts up to ``most`` that the budget allows, at a cost of ``each`` for attention, the one with the most tokens for its products."""
        best, price = 0, 0
        for allowed in self._counts(each):
            count = min(allowed, most)
            cost = self._products(self._tokens + count)
            if count > 0 and (not best or (self._taken + count) * price > (self._taken + best) * cost):
                best, price = count, cost
        if best:
            return best
        # Not even the smallest size is within the budget.
        room = min((size - self._tokens for size, _ in self._sizes if size > self._tokens), default=most)
        return 1 if self._taken else max(1, min(most, room, self._left * self._unit // (self._unit + each)))

    def _counts(self, each: int) -> list[int]:
        """The most tokens for each size, and for any beyond the last one."""
        counts = []
        for size, cost in self._sizes:
            free = self._budget - cost * self._unit
            if size > self._tokens and free >= 0:
                counts.append(min(size - self._tokens, free // each) if each else size - self._tokens)
        first = max(0, (self._sizes[-1][0] if self._sizes else 0) - self._tokens)
        free = self._budget - self._products(self._tokens + first) * self._unit - first * each
        if free >= 0:
            counts.append(first + free // (self._unit + each))
        return counts

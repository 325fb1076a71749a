"""How much of prompts a step takes, so that steps beside decodes take equally long."""

from fractions import Fraction

from atlas_core.scheduler.limits import Limits


class Allowance:
    """What is left for prompts in a step with ``decodes`` tokens of running sequences.

    Beside decodes a step costs what its products do and, for each prompt token, its context / ``Limits.even_context``, all of it in
    tokens without a context; ``Limits.max_mixed_tokens`` is the most. Kernels take tokens in tiles, so products cost one amount up to
    each size of ``Limits.mixed_steps``. A prompt that does not fit fills that size within the budget which has the most tokens for what its
    products cost, and is the step's last one. Where even the smallest size is beyond the budget, tokens count as if all cost the same.
    Integers alone, so that the same requests are cut alike everywhere.
    """

    def __init__(self, limits: Limits, decodes: int) -> None:
        most = limits.max_mixed_tokens if decodes else None
        even = None if most is None else limits.even_context
        self._sizes = () if most is None else limits.mixed_steps
        self._unit, self._attends = (1, False) if even is None else (even, True)
        self._left = limits.prompt_tokens(decodes)
        self._tokens, self._taken, self._cut = decodes, 0, False
        budget = decodes + self._left
        if most is not None and budget > most:
            budget = max(
                budget, self._products(budget)
            )  # so many decodes that prompts have their share beyond the most
        self._budget = budget * self._unit

    def __bool__(self) -> bool:
        """Whether a further prompt gets a token at least."""
        if self._cut or not self._left:
            return False
        # One more costs its products and, where context counts, something for that.
        return not self._taken or self._products(self._tokens + 1) * self._unit + self._attends <= self._budget

    def take(self, wanted: int, context: int) -> int:
        """Tokens that a prompt gets of ``wanted`` (one or more) behind ``context`` positions: one at least, if there are any left."""
        each, most = context if self._attends else 0, min(wanted, self._left)
        count = most
        if most < wanted or not self._fits(most, each):
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
        """Of the whole sizes within the budget, at a cost of ``each`` for a token's attention, the one with the most tokens for its products."""
        counts = [min(most, size - self._tokens) for size, _ in self._sizes if size > self._tokens]
        affordable = [count for count in [*counts, self._beyond(most, each)] if count and self._fits(count, each)]
        if affordable:
            return max(
                affordable, key=lambda count: Fraction(self._taken + count, self._products(self._tokens + count))
            )
        return 1 if self._taken else max(1, min(*counts, most, self._left * self._unit // (self._unit + each)))

    def _beyond(self, most: int, each: int) -> int:
        """The most tokens within the budget that are more than the last size holds."""
        first = max(0, (self._sizes[-1][0] if self._sizes else 0) - self._tokens)
        free = self._budget - self._products(self._tokens + first) * self._unit - first * each
        return min(most, first + free // (self._unit + each)) if free >= 0 else 0

    def _fits(self, count: int, each: int) -> bool:
        return self._products(self._tokens + count) * self._unit + count * each <= self._budget

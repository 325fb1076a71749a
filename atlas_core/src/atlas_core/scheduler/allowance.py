"""How much of prompts a step takes, so that steps beside decodes take equally long."""

from atlas_core.scheduler.limits import Limits


class Allowance:
    """What is left for prompts in a step with ``decodes`` tokens of running sequences.

    Beside decodes a prompt token costs more the more positions stand before it: 1 + context / ``Limits.even_context`` tokens. Kernels
    take a step's tokens in tiles, so a prompt that must be cut is cut where the step's tokens fill tiles of ``Limits.mixed_tile``.
    A cut prompt is a step's last one. Integers alone, so that the same requests are cut alike everywhere.
    """

    def __init__(self, limits: Limits, decodes: int) -> None:
        mixed = decodes > 0 and limits.max_mixed_tokens is not None
        self._planned = decodes
        self._tile = limits.mixed_tile if mixed else 1
        self._even = limits.even_context if mixed else None
        self._tokens = limits.prompt_tokens(decodes)
        self._cost = self._tokens * (self._even or 1)

    def __bool__(self) -> bool:
        """Whether a further prompt gets a token at least."""
        return self._tokens > 0 and self._cost > 0

    def take(self, wanted: int, context: int) -> int:
        """Tokens that a prompt gets of ``wanted`` (one or more) behind ``context`` positions: one at least, if there are any left."""
        each = 1 if self._even is None else self._even + context
        count = min(wanted, self._tokens, max(1, self._cost // each))
        if count < wanted:
            whole = (self._planned + count) // self._tile * self._tile - self._planned
            # Where so little would be left, one more tile is the better bargain.
            count = whole if 2 * whole >= count else count
            self._tokens = 0
        else:
            self._tokens -= count
        self._planned += count
        self._cost -= count * each
        return count

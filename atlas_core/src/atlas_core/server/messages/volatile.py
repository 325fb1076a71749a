"""What clients write into system prompts and change with every request, so that no prefix would stay the same. Pure."""

import re

_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_LEFT = re.compile(r"<total_tokens>[^<]*</total_tokens>\n?")


def stable(system: str) -> str:
    """``system`` without the lines of the billing header and without ``<total_tokens>…</total_tokens>``.

    Both speak of another service: the one accounts for it, the other counts down what is left of its context.
    """
    return _LEFT.sub("", _BILLING.sub("", system))

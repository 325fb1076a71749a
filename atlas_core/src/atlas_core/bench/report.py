"""What the samples add up to, as values that JSON can hold and as a table. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct, to_builtins

from atlas_core.bench.sample import Sample
from atlas_core.bench.statistics import Distribution, describe
from atlas_core.bench.workload import Workload

_MS = 1000.0


class Summary(Struct, frozen=True):
    """``seconds`` is from the first request to the end of the last answer; throughputs are over it, failures left out.

    ``ttft`` is the time to the first token, ``inter_token`` that between two pieces of one answer, ``per_token`` an answer's time
    after its first token over the tokens that follow, ``end_to_end`` that of a whole answer: all in milliseconds. Times
    count from when a request was due, so that a server which falls behind cannot hide it.
    """

    requests: int
    succeeded: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    counted: bool
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Distribution | None
    inter_token_ms: Distribution | None
    per_token_ms: Distribution | None
    end_to_end_ms: Distribution | None
    errors: dict[str, int]

    def as_json(self, workload: Workload, url: str) -> dict[str, Any]:
        """With everything needed to repeat the measurement."""
        return {"url": url, "workload": to_builtins(workload), **to_builtins(self)}


def summarise(samples: Sequence[Sample]) -> Summary:
    """Sum up at least one sample."""
    good = [sample for sample in samples if not sample.error]
    seconds = max(sample.ended for sample in samples) - min(sample.sent for sample in samples)
    prompt = sum(sample.prompt_tokens for sample in good)
    completion = sum(sample.completion_tokens for sample in good)
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    return Summary(
        requests=len(samples),
        succeeded=len(good),
        seconds=seconds,
        prompt_tokens=prompt,
        completion_tokens=completion,
        counted=all(sample.counted for sample in good),
        requests_per_second=len(good) * per_second,
        output_tokens_per_second=completion * per_second,
        total_tokens_per_second=(prompt + completion) * per_second,
        ttft_ms=describe([_MS * (s.arrivals[0] - s.due) for s in good]),
        inter_token_ms=describe([_MS * (after - before) for s in good for before, after in pairwise(s.arrivals)]),
        per_token_ms=describe(
            [
                _MS * (s.arrivals[-1] - s.arrivals[0]) / (s.completion_tokens - 1)
                for s in good
                if s.completion_tokens > 1
            ]
        ),
        end_to_end_ms=describe([_MS * (s.ended - s.due) for s in good]),
        errors=dict(Counter(sample.error for sample in samples if sample.error).most_common()),
    )


def table(summary: Summary) -> Iterator[str]:
    """The lines for a person."""
    yield f"requests      {summary.succeeded} of {summary.requests} answered in {summary.seconds:.2f} s"
    guess = "" if summary.counted else "  (not told by the server: pieces of text are counted)"
    yield f"tokens        {summary.prompt_tokens} of prompts, {summary.completion_tokens} of answers{guess}"
    yield (
        f"throughput    {summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.1f} output tokens/s, "
        f"{summary.total_tokens_per_second:.1f} tokens/s in all"
    )
    yield f"{'milliseconds':22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    for name, found in (
        ("time to first token", summary.ttft_ms),
        ("inter-token", summary.inter_token_ms),
        ("per output token", summary.per_token_ms),
        ("end to end", summary.end_to_end_ms),
    ):
        if found is not None:
            cells = (found.mean, found.p50, found.p90, found.p99, found.largest)
            yield f"{name:22}" + "".join(f"{cell:10.2f}" for cell in cells)
    for error, count in summary.errors.items():
        yield f"failed {count} × {error}"

"""Metrics under the names that dashboards and gateways of other servers look for."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector

from atlas_core.server.lifecycle import Lifecycle

_VLLM: Mapping[str, str] = {
    "atlas_requests_running": "num_requests_running",
    "atlas_requests_waiting": "num_requests_waiting",
    "atlas_kv_usage_ratio": "kv_cache_usage_perc",
    "atlas_prompt_tokens": "prompt_tokens prefix_cache_queries",
    "atlas_cached_tokens": "prefix_cache_hits",
    "atlas_generation_tokens": "generation_tokens",
    "atlas_time_to_first_token_seconds": "time_to_first_token_seconds",
    "atlas_inter_token_latency_seconds": "inter_token_latency_seconds",
    "atlas_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "atlas_sequence_latency_seconds": "e2e_request_latency_seconds",
    "atlas_request_queue_seconds": "request_queue_time_seconds",
    "atlas_request_prefill_seconds": "request_prefill_time_seconds",
    "atlas_request_decode_seconds": "request_decode_time_seconds",
    "atlas_sequences_finished": "request_success",
    "atlas_preemptions": "num_preemptions",
    "atlas_cache_config": "cache_config",
}
_SGLANG: Mapping[str, str] = {
    "atlas_requests_running": "num_running_reqs",
    "atlas_requests_waiting": "num_queue_reqs",
    "atlas_kv_usage_ratio": "token_usage",
    "atlas_kv_tokens_used": "num_used_tokens",
    "atlas_prompt_tokens": "prompt_tokens",
    "atlas_cached_tokens": "cached_tokens",
    "atlas_generation_tokens": "generation_tokens",
    "atlas_time_to_first_token_seconds": "time_to_first_token_seconds",
    "atlas_inter_token_latency_seconds": "inter_token_latency_seconds",
    "atlas_sequence_latency_seconds": "e2e_request_latency_seconds",
}
_LLAMACPP: Mapping[str, str] = {
    "atlas_requests_running": "requests_processing",
    "atlas_requests_waiting": "requests_deferred",
    "atlas_prompt_tokens": "prompt_tokens",
    "atlas_generation_tokens": "tokens_predicted",
}
_LABELS: Mapping[str, str] = {"reason": "finished_reason", "page_tokens": "block_size", "pages": "num_gpu_blocks"}

NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {"vllm": ("vllm:", _VLLM), "sglang": ("sglang:", _SGLANG), "llamacpp": ("llamacpp:", _LLAMACPP)}
)
"""By server: the prefix of its names, and its names of ours, several with blanks between them."""


class Aliases(Collector):
    """The metrics of another registry, renamed; ``model_name`` is added to their labels, as those dashboards select by it."""

    def __init__(self, source: CollectorRegistry, server: str, lifecycle: Lifecycle) -> None:
        self._source = source
        self._prefix, self._names = NAMES[server]
        self._lifecycle = lifecycle

    def describe(self) -> Iterator[Metric]:
        """Nothing: the source has described them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every metric that has another name."""
        service = self._lifecycle.known
        model = {} if service is None else {"model_name": service.model.names[0]}
        for metric in self._source.collect():
            for name in self._names.get(metric.name, "").split():
                renamed = Metric(self._prefix + name, metric.documentation, metric.type)
                renamed.samples = [
                    _renamed(sample, renamed.name + sample.name.removeprefix(metric.name), model)
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield renamed


def _renamed(sample: Sample, name: str, more: Mapping[str, str]) -> Sample:
    labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
    return Sample(name, {**labels, **more}, sample.value, sample.timestamp, sample.exemplar)

"""What /metrics says, under the names that dashboards, gateways and load tools read: vllm:*.

Gauges and sums of the engine are read when they are asked for. Times of requests are observed by the server, in
histograms, whose counts only grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pagedkv.engine.client import EngineClient
from pagedkv.engine.outputs import RequestOutput

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TIMES = {
    "time_to_first_token_seconds": (LONG, "until the first token of a streamed answer, or of a whole one"),
    "inter_token_latency_seconds": (SHORT, "between two outputs of a streamed answer"),
    "request_queue_time_seconds": (LONG, "until the first step that computes a request"),
    "e2e_request_latency_seconds": (LONG, "of a request that ended by itself"),
}


class Metrics:
    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client, self._model = client, model_name
        self._registry = CollectorRegistry(auto_describe=False)
        labels = ("model_name",)

        def histogram(name: str, buckets: tuple[float, ...], text: str) -> Any:
            family = Histogram(f"vllm:{name}", f"Seconds {text}", labels, buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        def counter(name: str, text: str) -> Any:
            return Counter(f"vllm:{name}", text, labels, registry=self._registry).labels(model_name)

        self.times = {name: histogram(name, *how) for name, how in TIMES.items()}

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were answered")
        self.generation_tokens = counter("generation_tokens", "Tokens of answers")
        self._success = Counter(
            "vllm:request_success", "Answers that ended by themselves", (*labels, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(self)

    def succeeded(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def request(self) -> RequestRecord:
        return RequestRecord(self)

    def text(self) -> bytes:
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Any]:
        """The engine's own figures."""
        stats = self._client.stats()
        pool = stats.pool
        gauges = {
            "num_requests_running": ("Answers that hold pages", stats.num_running),
            "num_requests_waiting": ("Answers that wait", stats.num_waiting),
            "kv_cache_usage_perc": ("The share of pages in use, 1 is all", pool["used"] / pool["num_blocks"]),
        }
        sums = {
            "num_preemptions": ("Times that a request gave way", stats.num_preemptions),
            "prefix_cache_queries": ("Tokens of prompts that were looked up", pool["lookup_tokens"]),
            "prefix_cache_hits": ("Tokens of prompts that were found", pool["hit_tokens"]),
        }
        for kind, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, sums)):
            for name, (text, value) in figures.items():
                family = kind(f"vllm:{name}", text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family


class RequestRecord:
    """The times of one request of the engine."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: dict[int, float] = {}  # by answer: when its last output came
        self._has_started = False

    def take(self, output: RequestOutput) -> None:
        times, at = self._metrics.times, output.metrics
        if not self._has_started and at.time_to_first_token is not None:
            self._has_started = True
            self._metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            times["time_to_first_token_seconds"].observe(at.time_to_first_token)
            if at.queue_time is not None:
                times["request_queue_time_seconds"].observe(at.queue_time)
        for one in output.outputs:
            self._metrics.generation_tokens.inc(len(one.token_ids))
            if one.index in self._last:
                times["inter_token_latency_seconds"].observe(at.total_time - self._last[one.index])
            self._last[one.index] = at.total_time
            if one.finish_reason is not None:
                self._metrics.succeeded(one.finish_reason)
        if output.finished:
            times["e2e_request_latency_seconds"].observe(at.total_time)

"""What /metrics says: under the names that dashboards, gateways and load tools read (vllm:*), and ours (pagedkv:*).

All of it is the engine's own, which one scrape of any front end shows: nothing here is in the way of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pagedkv.engine.client import EngineClient
from pagedkv.engine.outputs import EngineStats
from pagedkv.engine.traffic import Histogram

OWN_END = ("stop", "length")  # the reasons of answers that ended by themselves


class Metrics:
    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client, self._model = client, model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Any]:
        stats = self._client.stats()
        for kind, figures in ((GaugeMetricFamily, self._gauges(stats)), (CounterMetricFamily, _sums(stats))):
            for name, (text, value) in figures.items():
                family = kind(name, text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family
        for name, (text, histogram) in _histograms(stats).items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], _buckets(histogram), histogram.total)
            yield family
        yield self._ends("vllm:request_success", "Answers that ended by themselves", stats, True)
        yield self._ends("pagedkv:request_ends", "Answers that failed, or whose client left", stats, False)

    def _ends(self, name: str, text: str, stats: EngineStats, are_own: bool) -> Any:
        family = CounterMetricFamily(name, text, labels=["model_name", "finished_reason"])
        for reason, count in stats.traffic.ended.items():
            if (reason in OWN_END) == are_own:
                family.add_metric([self._model, reason], count)
        return family

    def _gauges(self, stats: EngineStats) -> dict[str, tuple[str, float]]:
        pool = stats.pool
        try:
            step = self._client.health() or 0.0
        except RuntimeError:
            step = float("inf")  # it serves nothing any more
        return {
            "vllm:num_requests_running": ("Answers that hold pages", stats.num_running),
            "vllm:num_requests_waiting": ("Answers that wait", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("The share of pages in use, 1 is all", pool["used"] / pool["num_blocks"]),
            "pagedkv:step_in_work_seconds": ("The step in work until now; 0: idle, inf: the engine has ended", step),
            "pagedkv:peak_used_blocks": ("The most pages that were in use", stats.counters.peak_used_blocks),
        }


def _sums(stats: EngineStats) -> dict[str, tuple[str, float]]:
    traffic, pool, counters = stats.traffic, stats.pool, stats.counters
    return {
        "vllm:prompt_tokens": ("Tokens of prompts that were computed or found", traffic.prompt_tokens),
        "vllm:generation_tokens": ("Tokens of answers", traffic.new_tokens),
        "vllm:num_preemptions": ("Times that a request gave way", stats.num_preemptions),
        "vllm:prefix_cache_queries": ("Tokens of prompts that were looked up", pool["lookup_tokens"]),
        "vllm:prefix_cache_hits": ("Tokens of prompts that were found", pool["hit_tokens"]),
        "vllm:spec_decode_num_drafts": ("Times that a request had guesses in a step", counters.num_drafts),
        "vllm:spec_decode_num_draft_tokens": ("Tokens that were guessed", counters.num_draft_tokens),
        "vllm:spec_decode_num_accepted_tokens": ("Guesses that were right", counters.num_accepted_tokens),
        "pagedkv:steps": ("Steps of the engine", counters.num_steps),
        "pagedkv:prefill_seconds": ("Seconds of steps that compute prompts", counters.prefill_seconds),
        "pagedkv:decode_seconds": ("Seconds of steps that only decode", counters.decode_seconds),
        "pagedkv:host_seconds": ("Seconds of planning and taking results", counters.host_seconds),
    }


def _histograms(stats: EngineStats) -> dict[str, tuple[str, Histogram]]:
    traffic = stats.traffic
    return {
        "vllm:time_to_first_token_seconds": ("Seconds until the first token", traffic.first_token),
        "vllm:inter_token_latency_seconds": ("Seconds between two tokens of an answer", traffic.between_tokens),
        "vllm:request_queue_time_seconds": ("Seconds until the first step with the request", traffic.queue),
        "vllm:e2e_request_latency_seconds": ("Seconds of requests that ended by themselves", traffic.whole),
        "vllm:iteration_tokens_total": ("Tokens computed in a step", traffic.step_tokens),
    }


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))

"""The engine: continuous batching on BlockManager and the package's operations."""

from .async_engine import AsyncEngine
from .engine import Engine
from .llm import LLM
from .outputs import CompletionOutput, EmbeddingOutput, EngineCounters, EngineStats, RequestMetrics, RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "Engine",
    "EngineCounters",
    "EngineStats",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

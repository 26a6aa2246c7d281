"""The engine: continuous batching on BlockManager and the package's operations."""

from .llm import LLM
from .outputs import EngineStats, RequestMetrics, RequestOutput
from .sampling_params import SamplingParams

__all__ = ["LLM", "EngineStats", "RequestMetrics", "RequestOutput", "SamplingParams"]

"""The engine: continuous batching on BlockManager and the package's operations."""

# Imported at first use: the command line reads the options (options.py, sampling_params.py) without all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pagedkv.models.ipc import IpcTensor
    from pagedkv.models.nccl import BroadcastTensor, WeightGroup
    from pagedkv.parallel.watch import RankError

    from .async_engine import AsyncEngine
    from .engine import Engine
    from .llm import LLM
    from .lora_request import LoRARequest
    from .outputs import CompletionOutput, EmbeddingOutput, EngineCounters, EngineStats, RequestMetrics, RequestOutput
    from .sampling_params import RequestOutputKind, SamplingParams
    from .structured_outputs import StructuredOutputsParams
    from .text.chat import ChatTemplate

__all__ = [
    "LLM", "AsyncEngine", "BroadcastTensor", "ChatTemplate", "CompletionOutput", "EmbeddingOutput", "Engine",
    "EngineCounters", "EngineStats", "IpcTensor", "LoRARequest", "RankError", "RequestMetrics", "RequestOutput",
    "RequestOutputKind", "SamplingParams", "StructuredOutputsParams", "WeightGroup",
]  # fmt: skip

if not TYPE_CHECKING:
    _MODULES = {
        "LLM": "engine.llm", "AsyncEngine": "engine.async_engine", "BroadcastTensor": "models.nccl",
        "ChatTemplate": "engine.text.chat", "Engine": "engine.engine", "IpcTensor": "models.ipc",
        "LoRARequest": "engine.lora_request", "RankError": "parallel.watch",
        "RequestOutputKind": "engine.sampling_params", "SamplingParams": "engine.sampling_params",
        "StructuredOutputsParams": "engine.structured_outputs", "WeightGroup": "models.nccl",
    }  # fmt: skip

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module 'pagedkv.engine' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"pagedkv.{_MODULES.get(name, 'engine.outputs')}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""The engine: continuous batching on BlockManager and the package's operations."""

# Imported at first use: the command line reads the options (options.py, sampling_params.py) without all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pagedkv.models.ipc import IpcTensor
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
    "LLM", "AsyncEngine", "ChatTemplate", "CompletionOutput", "EmbeddingOutput", "Engine", "EngineCounters",
    "EngineStats", "IpcTensor", "LoRARequest", "RankError", "RequestMetrics", "RequestOutput", "RequestOutputKind",
    "SamplingParams", "StructuredOutputsParams",
]  # fmt: skip

if not TYPE_CHECKING:
    _MODULES = {
        "LLM": "llm", "AsyncEngine": "async_engine", "ChatTemplate": "text.chat", "Engine": "engine",
        "IpcTensor": "control",
        "LoRARequest": "lora_request", "RankError": "core",
        "RequestOutputKind": "sampling_params", "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "structured_outputs",
    }  # fmt: skip

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in __all__:
            raise AttributeError(f"module 'pagedkv.engine' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"pagedkv.engine.{_MODULES.get(name, 'outputs')}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

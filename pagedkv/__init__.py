"""Paged KV cache, paged attention and a Qwen3 engine in plain C and CUDA C.

Three things that work alone, and an engine built on them: `BlockManager` (the page allocator), `store_kvcache`,
`paged_attention_fwd`, and `LLM`. Arrays come and go by DLPack: PyTorch, NumPy, CuPy and JAX objects are used in place.
"""

import os as _os

# libgomp reads its environment once, when the extension loads it. By default its idle threads spin for milliseconds
# and keep the one that has work from running where cores are shared: on 2 cores under a load of 8 the demo decoded 45
# tokens/s, and 5,000 with this. 1,000 rounds outlast the time between two operations. What the user has set counts.
_spins_by_default = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & _os.environ.keys()
if _spins_by_default:
    _os.environ["GOMP_SPINCOUNT"] = "1000"
try:
    import pagedkv._C as _C  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "pagedkv._C":
        raise
    raise ImportError(
        f"pagedkv was imported from {_os.path.dirname(__file__)}, which has no compiled extension (_C): in a checkout "
        "this is the folder of the sources. `pip install .` installs pagedkv; then import it from any other folder, "
        "and test it by `pytest`, not by `python -m pytest`. `make build` compiles the extension in place."
    ) from None
finally:
    if _spins_by_default:
        del _os.environ["GOMP_SPINCOUNT"]

from pagedkv._C import (  # noqa: E402
    BlockManager,
    CudaError,
    ElasticBuffer,
    Event,
    Graph,
    OutOfBlocks,
    Step,
    Stream,
    Tensor,
    __version__,
    append_kvcache,
    asarray,
    bias_logits,
    build_info,
    check_errors,
    copy_blocks,
    count_tokens,
    embedding,
    empty,
    from_dlpack,
    gather_rows,
    get_num_threads,
    linear,
    linear_algorithms,
    mask_logits,
    memory_info,
    merge_attention_states,
    paged_attention_fwd,
    plan_attention,
    qk_norm_rope_store,
    qkv_attention_fwd,
    reload_context,
    rms_norm,
    rope_append_kvcache,
    sample,
    sample_linear,
    scale_columns,
    set_num_threads,
    silu_and_mul,
    store_kvcache,
    swap_blocks,
    synchronize,
    take_sampled,
    token_logprobs,
    use_linear_algorithm,
)

# What needs NumPy (and the engine tokenizers) comes at first use; nothing above does.
TYPE_CHECKING = False  # as type checkers know it from typing, which takes a millisecond to import
if TYPE_CHECKING:
    from pagedkv.engine import LLM, AsyncEngine, Engine, SamplingParams
    from pagedkv.tuning import tune_linear

__all__ = [
    "LLM",
    "AsyncEngine",
    "BlockManager",
    "CudaError",
    "ElasticBuffer",
    "Engine",
    "Event",
    "Graph",
    "OutOfBlocks",
    "SamplingParams",
    "Step",
    "Stream",
    "Tensor",
    "__version__",
    "append_kvcache",
    "asarray",
    "bias_logits",
    "build_info",
    "check_errors",
    "copy_blocks",
    "count_tokens",
    "embedding",
    "empty",
    "from_dlpack",
    "gather_rows",
    "get_num_threads",
    "linear",
    "linear_algorithms",
    "mask_logits",
    "memory_info",
    "merge_attention_states",
    "paged_attention_fwd",
    "plan_attention",
    "qk_norm_rope_store",
    "qkv_attention_fwd",
    "reload_context",
    "rms_norm",
    "rope_append_kvcache",
    "sample",
    "sample_linear",
    "scale_columns",
    "set_num_threads",
    "silu_and_mul",
    "store_kvcache",
    "swap_blocks",
    "synchronize",
    "take_sampled",
    "token_logprobs",
    "tune_linear",
    "use_linear_algorithm",
]


def __getattr__(name: str) -> object:
    modules = dict.fromkeys(("AsyncEngine", "Engine", "LLM", "SamplingParams"), "engine") | {"tune_linear": "tuning"}
    if name not in modules:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"pagedkv.{modules[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

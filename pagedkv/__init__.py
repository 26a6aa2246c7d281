"""Paged KV cache, paged attention and an engine for language models in plain C and CUDA C.

Three parts work alone: `BlockManager` (the page allocator), `store_kvcache` and `paged_attention_fwd`. `LLM` is an
engine built on them. Arrays are exchanged by DLPack: objects of PyTorch, NumPy, CuPy and JAX are used in place.
"""

import os as _os

# libgomp reads its environment once, when the extension loads it. By default its idle threads spin for milliseconds.
# Where cores are shared, that keeps the thread that has work from running: on 2 cores under a load of 8 the demo
# decoded 45 tokens/s, and 5,000 with this. 1,000 rounds outlast the time between two operations. The user's settings
# win.
_spins_by_default = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & _os.environ.keys()
if _spins_by_default:
    _os.environ["GOMP_SPINCOUNT"] = "1000"
try:
    import pagedkv._C as _C
except ModuleNotFoundError as _error:
    if _error.name != "pagedkv._C":
        raise
    # The folder of the sources, without the compiled extension. Python takes it where a program starts in a checkout,
    # also after `pip install .`: then all modules come from the installed package, whose folder becomes __path__.
    import sys as _sys
    import warnings as _warnings
    from importlib.machinery import PathFinder as _Finder

    _here = _os.path.dirname(_os.path.realpath(__file__))
    _others = [_each for _each in _sys.path if _os.path.realpath(_os.path.join(_each or ".", "pagedkv")) != _here]
    _installed = _Finder.find_spec("pagedkv", _others)
    _folders = list(_installed.submodule_search_locations or ()) if _installed else []
    if not _Finder.find_spec("pagedkv._C", _folders):
        raise ImportError(
            f"pagedkv was imported from {_here}, which has no compiled extension (_C): in a checkout this is the "
            "folder of the sources. `pip install .` installs pagedkv, `make build` compiles the extension in place."
        ) from None
    __path__ = _folders
    __file__ = _os.path.join(_folders[0], "__init__.py")
    _warnings.warn(f"{_here} has no compiled extension: this is the pagedkv of {_folders[0]}", stacklevel=2)
    import pagedkv._C as _C  # noqa: F401
finally:
    if _spins_by_default:
        del _os.environ["GOMP_SPINCOUNT"]

from pagedkv._C import (  # noqa: E402
    BlockManager,
    CudaError,
    Event,
    Graph,
    OutOfBlocks,
    Stream,
    Tensor,
    asarray,
    copy_blocks,
    empty,
    from_dlpack,
    merge_attention_states,
    paged_attention_fwd,
    plan_attention,
    store_kvcache,
    swap_blocks,
)
from pagedkv._C import __version__ as __version__  # noqa: E402

# What needs NumPy (and, for the engine, tokenizers) is imported at first use; nothing above needs it.
TYPE_CHECKING = False  # type checkers take it for typing's, which takes a millisecond to import
if TYPE_CHECKING:
    from pagedkv import ops as ops
    from pagedkv.engine import LLM, AsyncEngine, Engine, SamplingParams

# At most twenty names; pagedkv.ops has all others.
__all__ = [
    "LLM",
    "AsyncEngine",
    "BlockManager",
    "CudaError",
    "Engine",
    "Event",
    "Graph",
    "OutOfBlocks",
    "SamplingParams",
    "Stream",
    "Tensor",
    "asarray",
    "copy_blocks",
    "empty",
    "from_dlpack",
    "merge_attention_states",
    "paged_attention_fwd",
    "plan_attention",
    "store_kvcache",
    "swap_blocks",
]

if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in ("AsyncEngine", "Engine", "LLM", "SamplingParams"):
            value = globals()[name] = getattr(import_module("pagedkv.engine"), name)
            return value
        ops = import_module("pagedkv.ops")  # its import puts it among the names of this module
        if name == "ops":
            return ops
        if name in ops.__all__:  # these names stood here before pagedkv.ops had them
            import warnings

            warnings.warn(f"pagedkv.{name} is pagedkv.ops.{name} now", DeprecationWarning, stacklevel=2)
            return getattr(ops, name)
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "ops"])

"""Stand-ins for the parts of SGLang that pagedkv.integrations.sglang imports and is called with.

`modules()` are its modules, by name; the rest is a batch, a layer, the pools and a runner, each with the attributes that
the backend reads and no others. tests/test_sglang_interface.py holds both against a wheel of SGLang. Where SGLang itself
can be imported, tests/test_sglang.py runs on its modules, too.
"""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="SGLang serves PyTorch models")


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    PREBUILT = 7
    SPLIT_PREFILL = 8
    DLLM_EXTEND = 9

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class SharedReadEnds(enum.Enum):
    PRE_REPLAY = 1
    IN_REPLAY = 2
    POST_REPLAY = 3
    UNKNOWN = 4


class AttentionBackend:
    """Sends a layer to the method for its batch."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        name = "forward_decode" if forward_batch.forward_mode.is_decode() else "forward_extend"
        return getattr(self, name)(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def shared_read_ends(self, fm):
        return SharedReadEnds.IN_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN


def modules() -> dict[str, ModuleType]:
    backends: dict[str, Any] = {}
    choices = {
        "ATTENTION_BACKEND_CHOICES": ["triton", "fa3"],
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": ["fa3"],
    }
    contents = {
        "arg_groups.choices": choices
        | {
            "add_attention_backend_choices": choices["ATTENTION_BACKEND_CHOICES"].extend,
            "add_deterministic_attention_backend_choices": choices["DETERMINISTIC_ATTENTION_BACKEND_CHOICES"].extend,
        },
        "layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": lambda name: lambda make: backends.setdefault(name, make),
        },
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend, "SharedReadEnds": SharedReadEnds},
        "layers.radix_attention": {"AttentionType": AttentionType},
        "mem_cache.swa_memory_pool": {"SWAKVPool": type("SWAKVPool", (), {})},
        "model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
        "runtime_context": {"get_exec": None, "get_parallel": None},
    }
    made: dict[str, ModuleType] = {}
    for name, names in contents.items():
        parts = ["sglang", "srt", *name.split(".")]
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            made.setdefault(path, ModuleType(path))
            if i > 1:
                setattr(made[".".join(parts[: i - 1])], parts[i - 1], made[path])
        vars(made[".".join(parts)]).update(names)
    return made


def imported(monkeypatch, *, is_real: bool, is_deterministic: bool = False) -> ModuleType:
    """pagedkv.integrations.sglang, on these modules or on SGLang's own."""
    if is_real:
        pytest.importorskip("sglang.srt.layers.attention.base_attn_backend", reason="SGLang is not installed")
    else:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pagedkv.integrations.sglang", raising=False)
    module = importlib.import_module("pagedkv.integrations.sglang")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # and forgotten behind the test
    # SGLang has these only in a server.
    deterministic = SimpleNamespace(enable_deterministic_inference=is_deterministic)
    monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False, attn_cp_size=1))
    return module


@dataclass
class Layer:
    layer_id: int = 0
    tp_q_head_num: int = 4
    tp_k_head_num: int = 2
    qk_head_dim: int = 64
    v_head_dim: int = 64
    scaling: float = 0.11
    logit_cap: float = 0.0
    logit_capping_method: str = "tanh"
    sliding_window_size: int | None = -1
    is_cross_attention: bool = False
    k_scale: float | None = None
    v_scale: float | None = None
    k_scale_float: float | None = None
    v_scale_float: float | None = None
    attn_type: Any = None  # the enumeration of the modules in use
    pos_encoding_mode: str = "NONE"
    xai_temperature_len: int = -1


@dataclass
class ForwardBatch:
    forward_mode: Any
    batch_size: int
    req_pool_indices: Any
    seq_lens: Any
    out_cache_loc: Any
    seq_lens_cpu: Any = None
    extend_seq_lens: Any = None
    extend_seq_lens_cpu: list[int] | None = None
    _attn_output: Any = None


@dataclass
class ReqToTokenPool:
    req_to_token: Any  # [num_requests + 1, context_len] int32


@dataclass
class KVPool:
    """[num_slots, num_kv_heads, head_dim] for each layer, or [num_pages, num_kv_heads, page_size, head_dim]."""

    buffers: dict[int, tuple[Any, Any]]

    def get_kv_buffer(self, layer_id: int):
        return self.buffers[layer_id]


@dataclass
class WindowPools(KVPool):
    """Two pools in one. A test gives it SGLang's SWAKVPool as a base."""

    layers_mapping: dict[int, tuple[int, bool]] = field(default_factory=dict)
    full_to_swa_index_mapping: Any = None
    swa_layer_nums: int = 1

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]


def make_runner(device: str, page_size: int, context_len: int, requests, pool, dtype, **others):
    fields = dict(
        device=device, page_size=page_size,
        model_config=SimpleNamespace(context_len=context_len, is_encoder_decoder=False), req_to_token_pool=requests,
        token_to_kv_pool=pool, kv_cache_dtype=dtype, kv_cache_dtype_str="auto",
        spec_algorithm=SimpleNamespace(name="NONE", is_none=lambda: True), use_mla_backend=False,
        attention_chunk_size=None, kv_index_translator=SimpleNamespace(is_translating=False),
    )
    return SimpleNamespace(**fields | others)

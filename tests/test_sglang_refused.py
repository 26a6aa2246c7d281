"""How SGLang's attention backend is registered, and what it refuses by name."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_sglang import ForwardMode, imported, make_runner, torch
from sglang_server import KINDS, MOST, Server


@pytest.fixture(params=["stand-ins"] + ["sglang"] * (importlib.util.find_spec("sglang") is not None))
def sglang(request, monkeypatch):
    return imported(monkeypatch, is_real=request.param == "sglang")


def test_registering_twice(sglang):
    """Every process of SGLang's registers all plugins, and some do it again."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for _ in range(2):
        sglang.register()
    assert ATTENTION_BACKENDS["pagedkv"] is not None
    assert choices.ATTENTION_BACKEND_CHOICES.count("pagedkv") == 1
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("pagedkv") == 1
    assert {"triton", "fa3"} <= set(choices.ATTENTION_BACKEND_CHOICES)


def test_without_sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in [name for name in sys.modules if name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "pagedkv.integrations.sglang", raising=False)
    with pytest.raises(ImportError, match=r"pagedkv.integrations.sglang needs SGLang 0.5.23 \(package sglang\)"):
        import pagedkv.integrations.sglang  # noqa: F401


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (dict(spec_algorithm=SimpleNamespace(name="EAGLE", is_none=lambda: False)), "speculative_algorithm EAGLE"),
        (dict(use_mla_backend=True), "use_mla_backend"),
        (dict(model_config=SimpleNamespace(context_len=9, is_encoder_decoder=True)), "is_encoder_decoder"),
        (dict(attention_chunk_size=8192), "attention_chunk_size 8192"),
        (dict(kv_cache_dtype=torch.float8_e5m2), "kv_cache_dtype torch.float8_e5m2"),
        (dict(kv_cache_dtype_str="mxfp8"), "kv_cache_dtype mxfp8"),
        (dict(kv_index_translator=SimpleNamespace(is_translating=True)), "enable_unified_memory"),
    ],
)
def test_refused_servers(sglang, runner, message):
    with pytest.raises(NotImplementedError, match=message):
        sglang.PagedKVBackend(make_runner("cpu", 1, 9, None, None, torch.bfloat16, **runner))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [(dict(dcp_enabled=True, attn_cp_size=1), "dcp_size"), (dict(dcp_enabled=False, attn_cp_size=2), "attn_cp_size 2")],
)
def test_refused_parallelism(sglang, monkeypatch, parallel, message):
    monkeypatch.setattr(sglang, "get_parallel", lambda: SimpleNamespace(**parallel))
    with pytest.raises(NotImplementedError, match=message):
        sglang.PagedKVBackend(make_runner("cpu", 1, 9, None, None, torch.bfloat16))


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND", "PREBUILT"])
def test_refused_modes(sglang, seed, mode):
    server = Server(sglang, seed, "cpu", 16, KINDS["float32"])
    batch = server.batch(ForwardMode.EXTEND, [(server.add(), 3)])
    batch.forward_mode = sglang.ForwardMode[mode]
    with pytest.raises(NotImplementedError, match=f"forward_mode {mode}"):
        server.backend.init_forward_metadata(batch)
    server.backend.init_cuda_graph_state(MOST, MOST)
    for mode in (batch.forward_mode, sglang.ForwardMode.EXTEND):
        batch.forward_mode = mode
        with pytest.raises(NotImplementedError, match=f"forward_mode {mode.name}"):
            server.backend.init_forward_metadata_out_graph(batch)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (dict(is_cross_attention=True), {}, "is_cross_attention"),
        (dict(v_head_dim=32), {}, "v_head_dim 32 beside 64"),
        (dict(pos_encoding_mode="ALIBI"), {}, "pos_encoding_mode ALIBI"),
        (dict(logit_cap=2.0, logit_capping_method="clip"), {}, "logit_capping_method clip"),
        (dict(xai_temperature_len=1024), {}, "xai_temperature_len"),
        (dict(attn_type="DECODER_BIDIRECTIONAL"), {}, "attn_type AttentionType.DECODER_BIDIRECTIONAL"),
        ({}, dict(q_rope=1), "q_rope"),
        ({}, dict(return_lse=True), "return_lse"),
    ],
)
def test_refused_layers(sglang, seed, layer, options, message):
    server = Server(sglang, seed, "cpu", 16, KINDS["float32"])
    batch = server.batch(ForwardMode.EXTEND, [(server.add(), 3)])
    server.backend.init_forward_metadata(batch)
    if "attn_type" in layer:
        layer = {"attn_type": sglang.AttentionType[layer["attn_type"]]}
    q, k, v, _ = server.inputs(3)[0]
    with pytest.raises(NotImplementedError, match=f"{message}: the pagedkv backend does not support it"):
        server.backend.forward(q, k, v, replace(server.layers[0], **layer), batch, **options)
    server.backend.forward(q, k, v, server.layers[0], batch, return_lse=False, q_rope=None)


def test_when_the_scheduler_may_write_its_tables(sglang, seed):
    backend, mode = Server(sglang, seed, "cpu", 16, KINDS["float32"]).backend, sglang.ForwardMode
    ends = sglang.SharedReadEnds
    assert [backend.shared_read_ends(each) for each in (mode.EXTEND, mode.DECODE, mode.MIXED)] == [
        ends.PRE_REPLAY, ends.IN_REPLAY, ends.UNKNOWN
    ]  # fmt: skip

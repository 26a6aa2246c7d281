"""The backend in SGLang's own pools and layers, on the CPU, beside SGLang's torch_native. Runs where SGLang is installed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from fake_sglang import imported, make_runner, torch

HEADS, KV_HEADS, DIM, PAGE, CONTEXT_LEN, NUM_SLOTS = 8, 2, 64, 16, 300, 640
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


PARTS = {
    "layers.attention.torch_native_backend": ["TorchNativeAttnBackend"],
    "layers.radix_attention": ["RadixAttention"],
    "mem_cache.memory_pool": ["MHATokenToKVPool", "ReqToTokenPool"],
    "mem_cache.swa_memory_pool": ["SWAKVPool"],
    "model_executor.forward_batch_info": ["ForwardBatch", "ForwardMode"],
    "model_executor.forward_context": ["ForwardContext", "forward_context"],
}


@pytest.fixture
def parts(monkeypatch):
    pytest.importorskip("sglang.srt.model_executor.runner", reason="SGLang is not installed")
    modules = ((importlib.import_module(f"sglang.srt.{module}"), names) for module, names in PARTS.items())
    found = {name: getattr(module, name) for module, names in modules for name in names}
    return SimpleNamespace(backend=imported(monkeypatch, is_real=True).PagedKVBackend, **found)


def make_pool(parts, kind: str, dtype):
    options = dict(page_size=PAGE, dtype=dtype, head_num=KV_HEADS, head_dim=DIM, device="cpu", enable_memory_saver=False)
    if kind != "window pool":
        return parts.MHATokenToKVPool(size=NUM_SLOTS, layer_num=2, **options)
    layers = dict(swa_attention_layer_ids=[1], full_attention_layer_ids=[0])
    pool = parts.SWAKVPool(size=NUM_SLOTS, size_swa=NUM_SLOTS, **layers, **options)
    pages = torch.arange(NUM_SLOTS // PAGE, -1, -1).roll(1)  # 0 is the page of padding in both
    pool.register_mapping((pages[:, None] * PAGE + torch.arange(PAGE)).flatten())
    return pool


class Pair:
    """Both backends, each with a pool of its own, and two requests."""

    def __init__(self, parts, kind: str, dtype, monkeypatch) -> None:
        self.parts, self.dtype = parts, dtype
        cache_dtype = torch.float8_e4m3fn if kind == "fp8" else dtype
        self.rows_pool = parts.ReqToTokenPool(
            size=4, max_context_len=CONTEXT_LEN, device="cpu", enable_memory_saver=False
        )
        theirs = make_pool(parts, "one pool", cache_dtype)  # torch_native reads no others
        if kind == "heads first":
            monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        self.pools = make_pool(parts, kind, cache_dtype), theirs
        self.backends = [
            make(make_runner("cpu", PAGE, CONTEXT_LEN, self.rows_pool, pool, cache_dtype))
            for make, pool in zip((parts.backend, parts.TorchNativeAttnBackend), self.pools)
        ]
        windows = enumerate((-1, 20))
        self.layers = [parts.RadixAttention(HEADS, DIM, 0.1, KV_HEADS, i, sliding_window_size=n) for i, n in windows]
        self.rows, self.lens = self.rows_pool.alloc_rows(2), [0, 0]
        self.free, self.pages = (torch.randperm(NUM_SLOTS // PAGE) + 1).tolist(), ([], [])

    def batch(self, mode: str, counts: list[int]):
        prefixes, slots = list(self.lens), []
        for i, count in enumerate(counts):
            self.lens[i] += count
            while len(self.pages[i]) * PAGE < self.lens[i]:
                self.pages[i].append(self.free.pop())
            position = torch.arange(prefixes[i], self.lens[i])
            slots.append(torch.tensor(self.pages[i])[position // PAGE] * PAGE + position % PAGE)
            self.rows_pool.req_to_token[self.rows[i], position] = slots[-1].int()
        extend = {} if mode == "DECODE" else dict(
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32), extend_seq_lens_cpu=counts,
            extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32), extend_prefix_lens_cpu=prefixes,
        )  # fmt: skip
        return self.parts.ForwardBatch(
            forward_mode=self.parts.ForwardMode[mode], batch_size=len(counts), seq_lens_sum=sum(self.lens),
            input_ids=torch.zeros(sum(counts), dtype=torch.int64), req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(self.lens), seq_lens_cpu=torch.tensor(self.lens), out_cache_loc=torch.cat(slots), **extend,
        )  # fmt: skip

    def check(self, mode: str, counts: list[int]) -> None:
        batch = self.batch(mode, counts)
        for backend in self.backends:
            backend.init_forward_metadata(batch)
        for layer in self.layers:
            qkv = [torch.randn(sum(counts), n * DIM).to(self.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
            outs = []
            for backend in self.backends:
                with self.parts.forward_context(self.parts.ForwardContext(attn_backend=backend)):
                    outs.append(layer(*(x.clone() for x in qkv), batch))
            torch.testing.assert_close(*outs, atol=(error := TOLERANCES[self.dtype]), rtol=error)

    def check_pools(self, kind: str) -> None:
        """Every slot but those of padding holds the same bits, whoever stored it."""
        for layer in self.layers:
            for ours, theirs in zip(*(pool.get_kv_buffer(layer.layer_id) for pool in self.pools)):
                if kind == "heads first":
                    ours = ours.transpose(1, 2).flatten(0, 1)
                if kind == "window pool" and layer.layer_id == 1:
                    ours = ours[self.pools[0].full_to_swa_index_mapping]
                assert torch.equal(ours.view(torch.uint8)[PAGE:], theirs.view(torch.uint8)[PAGE:])
                assert ours.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["one pool", "window pool", "heads first", "fp8"])
def test_beside_torch_native(parts, monkeypatch, seed, kind, dtype):
    torch.manual_seed(seed)
    pair = Pair(parts, kind, dtype, monkeypatch)
    for mode, *counts in (("EXTEND", 37, 130), ("EXTEND", 20, 1), ("MIXED", 1, 30), ("DECODE", 1, 1), ("DECODE", 1, 1)):
        pair.check(mode, counts)
    pair.check_pools(kind)

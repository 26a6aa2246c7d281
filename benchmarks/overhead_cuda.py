"""Host time of a call on CUDA tensors of torch, the launch included: one token, 16 keys, 16/8 heads of 128.

    python benchmarks/overhead_cuda.py       prints a table and writes benchmarks/results/overhead-cuda.json

Microseconds a call, of 100 calls at a time that nothing waits for: the median and the least of 200 such times. The card
is waited for between them, so its queue never fills. Beside ours: a call that does nothing, torch.add(out=), and where
vLLM is installed its store and its FlashAttention 3, the peer's own wrappers.
"""

import statistics
import time
from collections.abc import Callable

import torch
from record import make_parser, record_run, version

import pagedkv
from pagedkv import ops
from pagedkv.compat import flash_attn

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, CONTEXT = 16, 8, 128, 16, 16
BF16, INT32 = {"device": "cuda", "dtype": torch.bfloat16}, {"device": "cuda", "dtype": torch.int32}


def measure(call: Callable[[], object], repeats: int) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(100):
            call()
        times.append((time.perf_counter() - start) * 1e4)
        torch.cuda.synchronize()
    return {"us": round(statistics.median(times), 3), "least_us": round(min(times), 3)}


def calls() -> dict[str, Callable[[], object]]:
    k_cache, v_cache = torch.randn(2, 64, PAGE, KV_HEADS, HEAD_DIM, **BF16)
    key, value = torch.randn(2, 1, KV_HEADS, HEAD_DIM, **BF16)
    q = torch.randn(1, Q_HEADS, HEAD_DIM, **BF16)
    out, x, y = torch.empty_like(q), torch.randn(16, device="cuda"), torch.empty(16, device="cuda")
    table, lens, slots = torch.tensor([[3]], **INT32), torch.tensor([CONTEXT], **INT32), torch.tensor([63], **INT32)
    batch = (q, k_cache, v_cache, table, lens)
    plan = pagedkv.plan_attention(*batch)
    nothing, store, attention = ops.get_num_threads, pagedkv.store_kvcache, pagedkv.paged_attention_fwd
    q4, key4, value4, before = q[None], key[None], value[None], lens - 1
    return {
        "nothing: ops.get_num_threads()": lambda: nothing(),
        "torch.add(x, y, out=z)": lambda: torch.add(x, x, out=y),
        "store_kvcache": lambda: store(key, value, k_cache, v_cache, slots),
        "append_kvcache": lambda: ops.append_kvcache(key, value, k_cache, v_cache, table, before),
        "paged_attention_fwd(out=, plan=)": lambda: attention(*batch, out=out, plan=plan),
        "paged_attention_fwd(out=)": lambda: attention(*batch, out=out),
        "paged_attention_fwd()": lambda: attention(*batch),
        "compat flash_attn_with_kvcache()": lambda: flash_attn.flash_attn_with_kvcache(
            q4, k_cache, v_cache, cache_seqlens=lens, block_table=table, causal=True
        ),
        "compat flash_attn_with_kvcache(k, v)": lambda: flash_attn.flash_attn_with_kvcache(
            q4, k_cache, v_cache, key4, value4, cache_seqlens=before, block_table=table, causal=True
        ),
    } | peers(key, value, q, out, k_cache, v_cache, table, lens)


def peers(key, value, q, out, k_cache, v_cache, table, lens) -> dict[str, Callable[[], object]]:
    try:
        import vllm._custom_ops as vllm_ops
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return {}
    slots, one = torch.tensor([63], device="cuda"), torch.ones(1, device="cuda")
    ends = torch.tensor([0, 1], **INT32)

    def attention(**more):
        return lambda: flash_attn_varlen_func(
            q, k_cache, v_cache, 1, ends, CONTEXT, seqused_k=lens, causal=True, block_table=table, fa_version=3, **more
        )

    return {
        "vLLM's reshape_and_cache_flash": lambda: vllm_ops.reshape_and_cache_flash(
            key, value, k_cache, v_cache, slots, "auto", one, one
        ),
        "vLLM's flash_attn_varlen_func(out=)": attention(out=out),
        "vLLM's flash_attn_varlen_func()": attention(),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for name, call in calls().items():
        measure(call, 5)
        rows.append({"call": name, **measure(call, options.repeats)})
        print(f"{rows[-1]['us']:8.2f} us  (least {rows[-1]['least_us']:7.2f})  {name}", flush=True)
    record_run(options, "overhead-cuda", rows, versions={"vllm": version("vllm")})


if __name__ == "__main__":
    main()

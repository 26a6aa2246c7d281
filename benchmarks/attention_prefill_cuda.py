"""Prefill attention on CUDA beside FlashAttention-3's, causal, bfloat16, pages of 16 tokens in random order.

`tflops` counts the pairs that a causal mask leaves: 4 * head_dim * query heads * pairs. `fa3` and
`fa3_best_page` are FlashAttention-3's burst figures on an H200 with pages of 16 and, at its best, of 256 (peers.json).
`us` is with a plan that was made before (plan_attention), `unplanned_us`
makes it, too. The ragged row's 16 lengths are spread evenly over 100 to 1,024, since FLOP/s depend on the draw.
Inputs rotate over at least 512 MB, launches run as one CUDA graph. Burst: 50 ms idle, one replay of some 8 ms, median
of 5. Sustained: 150 ms of the same load, then 100 ms.

    python benchmarks/attention_prefill_cuda.py [--cache-dtype float8_e4m3fn] [--name NAME] [--no-record]

PAGEDKV_CUDA_MAX_CC=80 times the kernels of compute capability 8.0 on a newer card.
"""

import os
import random
import statistics

import torch
from attention_cuda import burst_us, capture, time_us
from peers import figures
from record import make_parser, record_run

import pagedkv

PAGE, HEAD_DIM = 16, 128
RAGGED = random.Random(0).sample([100 + round(924 * (i + 0.5) / 16) for i in range(16)], 16)
# name, query/KV heads, queries of every sequence, keys
CASES = [
    ("1x4096", (16, 8), [4096], [4096]), ("1x16384", (16, 8), [16384], [16384]),
    ("16x1024", (16, 8), [1024] * 16, [1024] * 16), ("16xragged", (16, 8), RAGGED, RAGGED),
    ("2048 on 30720", (16, 8), [2048], [32768]), ("1x16384", (32, 8), [16384], [16384]),
    ("1x16384", (64, 8), [16384], [16384]),
]  # fmt: skip


def measure(name, heads, query_lens, context_lens, cache_dtype) -> dict:
    q_heads, kv_heads = heads
    pages = [-(-n // PAGE) for n in context_lens]
    copies = max(1, -(-(512 << 20) // (sum(pages) * PAGE * kv_heads * HEAD_DIM * 4)))
    pool = torch.randn(2, sum(pages) * copies, PAGE, kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = pool.to(getattr(torch, cache_dtype))
    order = torch.randperm(sum(pages) * copies, device="cuda", dtype=torch.int32)
    tables = torch.full((copies, len(pages), max(pages)), -1, device="cuda", dtype=torch.int32)
    for i, part in enumerate(order.split(pages * copies)):
        tables[i // len(pages), i % len(pages), : len(part)] = part
    q = torch.randn(sum(query_lens), q_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor(context_lens, device="cuda", dtype=torch.int32)
    ends = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    out = torch.empty_like(q)

    queries = dict(cu_seqlens_q=ends, max_seqlen_q=max(query_lens))
    a_plan = pagedkv.plan_attention(q, k_cache, v_cache, tables[0], lens, **queries)

    def capture_all(**options):
        def launch(i):
            pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables[i % copies], lens, out=out, **queries, **options)

        return capture(launch, launches)

    pairs = sum(n * (context - n) + n * (n + 1) // 2 for n, context in zip(query_lens, context_lens))
    flops = 4 * HEAD_DIM * q_heads * pairs
    launches = max(copies, int(8e-3 / (flops / 600e12)))
    graph, unplanned = capture_all(plan=a_plan), capture_all()
    time_us(graph, launches, 2)
    burst = burst_us(graph, launches)
    us = statistics.median(burst)
    replays = max(1, int(0.1e6 / (us * launches)))
    time_us(graph, launches, replays * 3 // 2 + 1)
    sustained = time_us(graph, launches, replays)
    unplanned_us = statistics.median(burst_us(unplanned, launches))
    result = dict(row=name, heads=f"{q_heads}/{kv_heads}", head_dim=HEAD_DIM, page=PAGE, cache=cache_dtype,
                  us=round(us, 1), us_min=round(min(burst), 1), us_max=round(max(burst), 1),
                  unplanned_us=round(unplanned_us, 1), tflops=round(flops / us / 1e6),
                  sustained_us=round(sustained, 1), sustained_tflops=round(flops / sustained / 1e6))
    if cache_dtype == "bfloat16":
        for suffix, page in (("", "page 16"), ("_best_page", "page 256")):
            fa3 = figures("flash-attention-3")["prefill_tflops"][page][f"{q_heads}/{kv_heads} {name}"]
            result |= {f"fa3{suffix}": fa3, f"of_fa3{suffix}": round(flops / us / 1e6 / fa3, 3)}
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cache-dtype", default="bfloat16", choices=["bfloat16", "float8_e4m3fn"])
    parser.add_argument("--name", default="attention-cuda-prefill", help="of the file in benchmarks/results")
    args = parser.parse_args()
    results = []
    for case in CASES:
        results.append(measure(*case, args.cache_dtype))
        print(*(f"{name}={value}" for name, value in results[-1].items()), flush=True)
        torch.cuda.empty_cache()
    record_run(args, args.name, results, versions={"max_cc": os.environ.get("PAGEDKV_CUDA_MAX_CC", "")})


if __name__ == "__main__":
    main()

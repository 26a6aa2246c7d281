"""Dense operations and sampling on one GPU: bytes over time, beside a copy measured in the same run.

    python benchmarks/dense_cuda.py [--only rms_norm] [--no-record]

Every row is a CUDA graph of calls over buffers that rotate through at least 512 MB of normal numbers. Burst: 50 ms idle, then a
window of a few milliseconds, median of 5. Sustained: 150 ms of the same load, then 100 ms. Bytes are what a call must read
and write once. `share` is of the copy's bytes per second (of the read's, for what only reads).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from record import add_record_option, record, version

import pagedkv

ROTATE_BYTES = 600 << 20
SHAPES = {"0.6B": dict(hidden=1024, intermediate=3072, heads=16, kv_heads=8), "8B": dict(hidden=4096, intermediate=12288, heads=32, kv_heads=8)}
HEAD_DIM, VOCAB = 128, 151_936


def normal(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype) if torch.Size(shape).numel() < 1 << 28 else torch.empty(
        shape, device="cuda", dtype=dtype).normal_()


def window(replay: Callable, count: int) -> float:
    """Seconds of `count` replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(make: Callable[[], Callable], bytes_per_call: int, *, min_calls: int = 1, sustained: bool = True) -> dict:
    """Times the calls that `make()` returns, each with buffers of its own."""
    num_sets = max(1, min(64, -(-ROTATE_BYTES // bytes_per_call)))
    calls = [make() for _ in range(num_sets)]
    calls = (calls * -(-min_calls // num_sets))[: max(num_sets, min_calls)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    once = max(window(graph.replay, 2) / 2, 1e-6)
    bursts = []
    for _ in range(5):
        torch.cuda.synchronize()
        time.sleep(0.05)
        count = max(1, int(4e-3 / once))
        bursts.append(window(graph.replay, count) / count / len(calls) * 1e6)
    result = {"us": round(statistics.median(bursts), 3), "us_min": round(min(bursts), 3), "us_max": round(max(bursts), 3),
              "bytes": bytes_per_call, "gb_s": round(bytes_per_call / statistics.median(bursts) / 1e3)}
    if sustained:
        window(graph.replay, int(0.15 / once) + 1)
        count = int(0.1 / once) + 1
        result["us_sustained"] = round(window(graph.replay, count) / count / len(calls) * 1e6, 3)
    return result


def copy_row(num_bytes: int) -> dict:
    def make():
        x, y = normal(num_bytes // 4), torch.empty(num_bytes // 4, device="cuda", dtype=torch.bfloat16)
        return lambda: torch.mul(x, 1, out=y)  # a kernel: a graph's copy node may take the copy engine

    return {"case": f"copy {num_bytes >> 20} MB", **measure(make, num_bytes)}


def rms_norm_row(model: str, tokens: int, with_residual: bool = True) -> dict:
    hidden = SHAPES[model]["hidden"]
    weight = normal(hidden)

    def make():
        x, residual, out = normal(tokens, hidden), normal(tokens, hidden), torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        return lambda: pagedkv.rms_norm(x, weight, residual=residual if with_residual else None, out=out)

    num_bytes = tokens * hidden * 2 * (4 if with_residual else 2)
    return {"case": f"rms_norm{' + residual' if with_residual else ''} {model} {tokens}", **measure(make, num_bytes)}


def silu_row(model: str, tokens: int) -> dict:
    size = SHAPES[model]["intermediate"]

    def make():
        x, out = normal(tokens, 2 * size), torch.empty(tokens, size, device="cuda", dtype=torch.bfloat16)
        return lambda: pagedkv.silu_and_mul(x, out=out)

    return {"case": f"silu_and_mul {model} {tokens}", **measure(make, tokens * size * 6)}


def rope_row(model: str, tokens: int, cache_dtype: str = "bfloat16") -> dict:
    heads, kv_heads = SHAPES[model]["heads"], SHAPES[model]["kv_heads"]
    weights, cos_sin = normal(2, HEAD_DIM), torch.rand(40_960, HEAD_DIM, device="cuda")
    num_blocks = -(-tokens // 16) + 8

    def make():
        qkv = normal(tokens, (heads + 2 * kv_heads) * HEAD_DIM)
        q_out = torch.empty(tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        caches = [pagedkv.empty((num_blocks, 16, kv_heads, HEAD_DIM), cache_dtype, "cuda:0") for _ in range(2)]
        pages = torch.randperm(num_blocks, device="cuda")[: -(-tokens // 16)]
        slots = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:tokens].contiguous()
        positions = (torch.arange(tokens, device="cuda") % 40_960).int()
        return lambda: pagedkv.qk_norm_rope_store(qkv, *weights, cos_sin, positions, *caches, slots, q_out=q_out)

    kv_bytes = 2 * kv_heads * HEAD_DIM * (1 if cache_dtype.startswith("float8") else 2)
    num_bytes = tokens * ((2 * heads + 2 * kv_heads) * HEAD_DIM * 2 + kv_bytes)
    return {"case": f"qk_norm_rope_store {cache_dtype} {model} {tokens}", **measure(make, num_bytes)}


def embedding_row(model: str, tokens: int) -> dict:
    hidden = SHAPES[model]["hidden"]
    table = normal(VOCAB, hidden)

    def make():
        ids, out = torch.randint(0, VOCAB, (tokens,), device="cuda"), torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        return lambda: pagedkv.embedding(ids, table, out=out)

    return {"case": f"embedding {model} {tokens}", **measure(make, tokens * hidden * 4)}


def sample_row(rows: int, dtype: torch.dtype, temperature: float, **options: float) -> dict:
    """With options the logits are as far apart as a model's are; a penalty finds 152 tokens of a row in its counts."""
    has_penalties = any("penalties" in name for name in options)

    def make():
        logits = normal(rows, VOCAB, dtype=dtype).mul_(4 if options else 1)
        arguments = (torch.full((rows,), temperature, device="cuda"), torch.randint(0, 1 << 62, (rows,), device="cuda"),
                     torch.randint(0, 4096, (rows,), device="cuda").int())
        arrays = {k: torch.full((rows,), v, device="cuda", dtype=torch.int32 if k == "top_k" else torch.float32) for k, v in options.items()}
        if has_penalties:
            arrays["counts"] = torch.zeros(rows, VOCAB, device="cuda", dtype=torch.int32)
            arrays["counts"][:, ::1000] = 2
        out = torch.empty(rows, device="cuda", dtype=torch.int32)
        return lambda: pagedkv.sample(logits, *arguments, out=out, **arrays)

    name = f"sample {rows} x {VOCAB} {str(dtype).removeprefix('torch.')}, temperature {temperature}"
    name += "".join(f", {key} {value}" for key, value in options.items())
    return {"case": name, **measure(make, rows * VOCAB * (dtype.itemsize + 4 * has_penalties))}


def logprobs_row(rows: int, num_best: int) -> dict:
    def make():
        logits, tokens = normal(rows, VOCAB, dtype=torch.float32), torch.zeros(rows, device="cuda", dtype=torch.int32)
        ids, out = (torch.empty(rows, num_best + 1, device="cuda", dtype=dtype) for dtype in (torch.int32, torch.float32))
        return lambda: pagedkv.token_logprobs(logits, tokens, num_best, out_ids=ids, out=out)

    return {"case": f"token_logprobs {rows} x {VOCAB} float32, {num_best} best", **measure(make, rows * VOCAB * 4)}


SAMPLE_OPTIONS = [{"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalties": 1.1}]


def cases() -> list[Callable[[], dict]]:
    rows = [lambda: copy_row(256 << 20), lambda: copy_row(1 << 30)]
    for tokens in (1, 64, 256, 2048, 16384):
        for model in SHAPES if tokens < 16384 else ["8B"]:
            rows += [lambda m=model, t=tokens: rms_norm_row(m, t), lambda m=model, t=tokens: silu_row(m, t),
                     lambda m=model, t=tokens: rope_row(m, t), lambda m=model, t=tokens: embedding_row(m, t)]
    rows += [lambda: rms_norm_row("8B", 16384, False), lambda: rope_row("8B", 16384, "float8_e4m3fn")]
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (1, 64, 256):
            rows += [lambda d=dtype, b=batch, t=t: sample_row(b, d, t) for t in (0.0, 0.6, 1.0)]
    for batch in (1, 256):
        rows += [lambda b=batch, o=o: sample_row(b, torch.float32, 0.8, **o) for o in SAMPLE_OPTIONS]
        rows += [lambda b=batch, n=n: logprobs_row(b, n) for n in (0, 5, 20)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    add_record_option(parser)
    parser.add_argument("--name", default="dense-cuda")
    options = parser.parse_args()
    torch.manual_seed(int(time.time()))
    results, ceiling = [], 0
    for make in cases():
        wanted = make.__code__.co_names[-1].removesuffix("_row")
        if options.only and wanted not in options.only.split(",") and wanted != "copy":
            continue
        row = make()
        torch.cuda.empty_cache()
        if row["case"].startswith("copy"):
            ceiling = max(ceiling, row["gb_s"])
        row["share"] = round(row["gb_s"] / ceiling, 3)
        results.append(row)
        print(f"{row['case']:58} {row['us']:9.2f} us ({row['us_min']:.2f}-{row['us_max']:.2f}) sustained {row.get('us_sustained', 0):9.2f}"
              f" {row['gb_s']:5} GB/s {row['share']:6.3f}", flush=True)
    if not options.no_record:
        gpu = torch.cuda.get_device_properties(0)
        record(options.name, results, machine={"gpu": gpu.name, "sms": gpu.multi_processor_count}, versions={"torch": version("torch")})


if __name__ == "__main__":
    main()

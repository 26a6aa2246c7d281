"""Dense operations, stores, copies and sampling on one GPU: bytes over time, beside a copy measured in the same run.

    python benchmarks/dense_cuda.py [--only rms_norm,store] [--beside FILE] [--no-record]

Every row is a CUDA graph of calls over buffers that rotate through 512 MB of normal numbers, or 64 sets where that is
less. Burst: 50 ms idle, then a window of a few milliseconds, median of 5. Sustained, where it takes the GPU long enough
to matter: 150 ms of the same load, then 100 ms. Bytes are what a call must read and write once; `share` is of the
copy's bytes per second (of what only reads, too). swap_blocks counts what crosses PCIe.

--beside times another build of the extension in the same run: `us_beside`. That is how the status word was measured,
by a build whose pk_record_bad_id does nothing.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import numpy as np
import torch
from record import make_parser, record_run

import pagedkv

ROTATE_BYTES = 600 << 20
MIN_SUSTAINED_BYTES = 64 << 20  # a call of less does not draw the power that lowers clocks
SHAPES = {
    "0.6B": {"hidden": 1024, "intermediate": 3072, "heads": 16},
    "8B": {"hidden": 4096, "intermediate": 12288, "heads": 32},
}
KV_HEADS, HEAD_DIM, VOCAB, NUM_CACHES = 8, 128, 151_936, 56
SAMPLE_OPTIONS = [{"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalties": 1.1}]
Call = Callable[[ModuleType], object]  # of an operation of pagedkv, or of the build beside it
builds: dict[str, ModuleType] = {"us": pagedkv._C}


def normal(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    if torch.Size(shape).numel() < 1 << 28:
        return torch.randn(shape, device="cuda").to(dtype)
    return torch.empty(shape, device="cuda", dtype=dtype).normal_()


def empty(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def window(replay: Callable, count: int) -> float:
    """Seconds of `count` replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(case: str, make: Callable[[], Call], bytes_per_call: int) -> dict:
    """Times the calls that `make()` returns, each with buffers of its own."""
    num_sets = max(1, min(64, -(-ROTATE_BYTES // bytes_per_call)))
    calls, row = [make() for _ in range(num_sets)], {"case": case, "bytes": bytes_per_call}
    for name, module in builds.items():
        row |= {name + key: value for key, value in measure_calls(calls, module, bytes_per_call).items()}
    return row | {"gb_s": round(bytes_per_call / row["us"] / 1e3)}


def measure_calls(calls: list[Call], module: ModuleType, bytes_per_call: int) -> dict:
    for call in calls:
        call(module)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(module)
    graph.replay()
    once = max(window(graph.replay, 2) / 2, 1e-6)

    def mean_us(seconds: float) -> float:
        count = int(seconds / once) + 1
        return round(window(graph.replay, count) / count / len(calls) * 1e6, 3)

    bursts = []
    for _ in range(5):
        torch.cuda.synchronize()
        time.sleep(0.05)
        bursts.append(mean_us(4e-3))
    result = {"": statistics.median(bursts), "_min": min(bursts), "_max": max(bursts)}
    if bytes_per_call >= MIN_SUSTAINED_BYTES:
        mean_us(0.15)
        result["_sustained"] = mean_us(0.1)
    return result


def copy_row(num_bytes: int) -> dict:
    def make() -> Call:
        x, y = normal(num_bytes // 4), empty(num_bytes // 4)
        return lambda _: torch.mul(x, 1, out=y)  # a kernel: a graph's copy node may take the copy engine

    return measure(f"copy {num_bytes >> 20} MB", make, num_bytes)


def rms_norm_row(model: str, tokens: int, with_residual: bool = True) -> dict:
    hidden = SHAPES[model]["hidden"]

    def make() -> Call:
        weight, x, out = normal(hidden), normal(tokens, hidden), empty(tokens, hidden)
        residual = normal(tokens, hidden) if with_residual else None
        return lambda module: module.rms_norm(x, weight, residual=residual, out=out)

    name = "rms_norm + residual" if with_residual else "rms_norm"
    return measure(f"{name} {model} {tokens}", make, tokens * hidden * 2 * (4 if with_residual else 2))


def silu_row(model: str, tokens: int) -> dict:
    size = SHAPES[model]["intermediate"]

    def make() -> Call:
        x, out = normal(tokens, 2 * size), empty(tokens, size)
        return lambda module: module.silu_and_mul(x, out=out)

    return measure(f"silu_and_mul {model} {tokens}", make, tokens * size * 6)


def pages_for(tokens: int, cache_dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two caches, and the tokens' slots: random pages."""
    num_blocks = -(-tokens // 16) + 8
    caches = [empty(num_blocks, 16, KV_HEADS, HEAD_DIM, dtype=cache_dtype) for _ in range(2)]
    pages = torch.randperm(num_blocks, device="cuda")[: -(-tokens // 16)]
    slots = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:tokens]
    return caches, slots.int().contiguous()


def kv_bytes(tokens: int, dtype: torch.dtype) -> int:
    return tokens * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rope_row(model: str, tokens: int, cache_dtype: torch.dtype = torch.bfloat16) -> dict:
    heads = SHAPES[model]["heads"]
    cos_sin = torch.rand(40_960, HEAD_DIM, device="cuda")

    def make() -> Call:
        weights, qkv = normal(2, HEAD_DIM), normal(tokens, (heads + 2 * KV_HEADS) * HEAD_DIM)
        q_out = empty(tokens, heads, HEAD_DIM)
        caches, slots = pages_for(tokens, cache_dtype)
        positions = (torch.arange(tokens, device="cuda") % 40_960).int()
        return lambda module: module.qk_norm_rope_store(qkv, *weights, cos_sin, positions, *caches, slots, q_out=q_out)

    num_bytes = tokens * (2 * heads + 2 * KV_HEADS) * HEAD_DIM * 2 + kv_bytes(tokens, cache_dtype)
    return measure(f"qk_norm_rope_store {name_of(cache_dtype)} {model} {tokens}", make, num_bytes)


def store_row(tokens: int, cache_dtype: torch.dtype = torch.bfloat16) -> dict:
    def make() -> Call:
        key, value = normal(2, tokens, KV_HEADS, HEAD_DIM)
        caches, slots = pages_for(tokens, cache_dtype)
        return lambda module: module.store_kvcache(key, value, *caches, slots)

    num_bytes = kv_bytes(tokens, torch.bfloat16) + kv_bytes(tokens, cache_dtype)
    return measure(f"store_kvcache {name_of(cache_dtype)} {tokens}", make, num_bytes)


def embedding_row(model: str, tokens: int) -> dict:
    hidden = SHAPES[model]["hidden"]
    table = normal(VOCAB, hidden)

    def make() -> Call:
        ids, out = torch.randint(0, VOCAB, (tokens,), device="cuda").int(), empty(tokens, hidden)
        return lambda module: module.embedding(ids, table, out=out)

    return measure(f"embedding {model} {tokens}", make, tokens * hidden * 4)


def blocks_row(num_pairs: int, direction: str = "") -> dict:
    """Random pages of 32 KB in all caches of the 0.6B shape: copied in their pool, swapped "out" or "in"."""
    page = (16, KV_HEADS, HEAD_DIM)
    caches = list(empty(NUM_CACHES, 1024, *page))
    num_bytes = num_pairs * NUM_CACHES * 32_768
    if not direction:

        def make_copy() -> Call:
            pairs = np.random.permutation(1024)[: 2 * num_pairs].reshape(-1, 2).astype(np.int32)
            return lambda module: module.copy_blocks(caches, pairs)

        return measure(f"copy_blocks {num_pairs} x {NUM_CACHES}", make_copy, 2 * num_bytes)

    hosts = list(torch.empty(NUM_CACHES, 256, *page, dtype=torch.bfloat16, pin_memory=True))

    def make_swap() -> Call:
        pages, places = (np.random.permutation(count)[:num_pairs].astype(np.int32) for count in (1024, 256))
        if direction == "out":
            return lambda module: module.swap_blocks(caches, hosts, np.stack([pages, places], 1))
        return lambda module: module.swap_blocks(hosts, caches, np.stack([places, pages], 1))

    return measure(f"swap_blocks {direction} {num_pairs} x {NUM_CACHES}", make_swap, num_bytes)


def drawn_by(rows: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """temperatures, seeds, positions"""
    seeds, positions = (torch.randint(0, high, (rows,), device="cuda") for high in (1 << 62, 4096))
    return torch.full((rows,), temperature, device="cuda"), seeds, positions.int()


def sample_row(rows: int, dtype: torch.dtype, temperature: float, **options: float) -> dict:
    """With options the logits are as far apart as a model's are; a penalty finds 152 tokens of a row in its counts."""
    has_penalties = any("penalties" in name for name in options)

    def make() -> Call:
        logits = normal(rows, VOCAB, dtype=dtype).mul_(4 if options else 1)
        arguments = drawn_by(rows, temperature)
        arrays = {
            name: torch.full((rows,), value, device="cuda", dtype=torch.int32 if name == "top_k" else torch.float32)
            for name, value in options.items()
        }
        if has_penalties:
            arrays["counts"] = torch.zeros(rows, VOCAB, device="cuda", dtype=torch.int32)
            arrays["counts"][:, ::1000] = 2
        out = torch.empty(rows, device="cuda", dtype=torch.int32)
        return lambda module: module.sample(logits, *arguments, out=out, **arrays)

    case = f"sample {rows} x {VOCAB} {name_of(dtype)}, temperature {temperature}"
    case += "".join(f", {name} {value}" for name, value in options.items())
    return measure(case, make, rows * VOCAB * (dtype.itemsize + 4 * has_penalties))


def sample_linear_row(model: str, rows: int, is_one_call: bool) -> dict:
    """The head's product and its tokens, in one call or in two; logits with a standard deviation of 1."""
    hidden = SHAPES[model]["hidden"]

    def make() -> Call:
        x, weight = normal(rows, hidden), normal(VOCAB, hidden).mul_(hidden**-0.5)
        arguments = drawn_by(rows, 0.6)
        logits, out = empty(rows, VOCAB, dtype=torch.float32), empty(rows, dtype=torch.int32)
        if is_one_call:
            return lambda module: module.sample_linear(
                x, weight, *arguments, logits=logits, weight_is_constant=True, out=out
            )

        def in_two(module: ModuleType) -> object:
            module.linear(x, weight, weight_is_constant=True, out=logits)
            return module.sample(logits, *arguments, out=out)

        return in_two

    name = "sample_linear" if is_one_call else "linear, sample"
    return measure(f"{name} {model} {rows}, temperature 0.6", make, VOCAB * hidden * 2)


def logprobs_row(rows: int, num_best: int) -> dict:
    def make() -> Call:
        logits = normal(rows, VOCAB, dtype=torch.float32)
        tokens, ids = (
            torch.zeros(*shape, device="cuda", dtype=torch.int32) for shape in ((rows,), (rows, num_best + 1))
        )
        out = torch.empty(rows, num_best + 1, device="cuda")
        return lambda module: module.token_logprobs(logits, tokens, num_best, out_ids=ids, out=out)

    return measure(f"token_logprobs {rows} x {VOCAB} float32, {num_best} best", make, rows * VOCAB * 4)


def cases() -> Iterator[Callable[[], dict]]:
    yield from (partial(copy_row, num_bytes) for num_bytes in (256 << 20, 1 << 30))
    for tokens in (1, 8, 32, 64, 256, 16_384):
        for model in SHAPES if tokens < 16_384 else ["8B"]:
            yield from (partial(row, model, tokens) for row in (rms_norm_row, silu_row, rope_row, embedding_row))
        yield partial(store_row, tokens)
    yield partial(rms_norm_row, "8B", 16_384, with_residual=False)
    for tokens in (64, 16_384):
        yield partial(rope_row, "8B", tokens, torch.float8_e4m3fn)
        yield partial(store_row, tokens, torch.float8_e4m3fn)
    yield from (partial(blocks_row, num_pairs) for num_pairs in (4, 256))
    yield from (partial(blocks_row, 64, direction) for direction in ("out", "in"))
    for dtype in (torch.float32, torch.bfloat16):
        for batch in (1, 64, 256):
            yield from (partial(sample_row, batch, dtype, temperature) for temperature in (0.0, 0.6))
    for batch in (1, 256):
        yield from (partial(sample_row, batch, torch.float32, 0.8, **options) for options in SAMPLE_OPTIONS)
        yield from (partial(logprobs_row, batch, num_best) for num_best in (0, 5, 20))
    for model in SHAPES:
        for batch in (1, 32, 64, 128, 256):
            yield from (partial(sample_linear_row, model, batch, is_one_call) for is_one_call in (True, False))


def load_build(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("beside._C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", default="", help="rms_norm, silu, rope, store, embedding, blocks, sample, sample_linear; with commas"
    )
    parser.add_argument("--beside", metavar="FILE", help="another build's _C.abi3.so, timed in the same run")
    parser.add_argument("--name", default="dense-cuda")
    options = parser.parse_args()
    if options.beside:
        builds["us_beside"] = load_build(options.beside)
    torch.manual_seed(int(time.time()))
    results, ceiling = [], 0
    for case in cases():
        name = case.func.__name__.removesuffix("_row")
        if options.only and name not in ["copy", *options.only.split(",")]:
            continue
        row = case()
        torch.cuda.empty_cache()
        if name == "copy":
            ceiling = max(ceiling, row["gb_s"])
        row["share"] = round(row["gb_s"] / ceiling, 3)
        results.append(row)
        print(
            f"{row['case']:54} {row['us']:9.2f} us ({row['us_min']:.2f}-{row['us_max']:.2f}) sustained"
            f" {row.get('us_sustained', 0):9.2f} {row['gb_s']:5} GB/s {row['share']:6.3f}"
            + (f"  beside {row['us_beside']:.2f}" if options.beside else ""),
            flush=True,
        )
    record_run(options, options.name, results)


if __name__ == "__main__":
    main()

"""Replays a trace's requests through LLM when they arrived: first tokens, time a token, prefix hits, preemptions.

    python benchmarks/serve_trace.py TRACE [--model 0.6B] [--device cuda] [--seconds 60] [--speed 4]

The trace is JSON lines as in traces.py, with real arrivals: mooncake_synthetic.jsonl of the Mooncake project, say.
Random weights; prompts share what the trace says they share. --speed 4 lets a minute of the trace pass in 15 seconds.
Requests longer than the model's length are refused, and counted. Without a trace a small generated one is replayed.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import traces
from record import make_parser, record_run

from pagedkv import LLM, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.engine import Engine, RequestOutput, RequestOutputKind

Served = list[tuple[RequestOutput, float]]  # and by how many seconds a request came late, because a step was computed


def serve(engine: Engine, requests: list[traces.Request], speed: float = 1.0) -> Served:
    """Each is submitted when its time has come, whatever the engine does then. One after the other in the result."""
    prompts = [traces.token_ids(request, engine.config.vocab_size) for request in requests]
    waiting, start = deque(requests), time.perf_counter()
    late: dict[str, float] = {}
    outputs: dict[str, RequestOutput] = {}
    while len(outputs) < len(requests):
        now = time.perf_counter()
        while waiting and start + waiting[0].seconds / speed <= now:
            request = waiting.popleft()
            params = SamplingParams(
                temperature=0.6, max_tokens=request.output_length, ignore_eos=True, seed=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            late[engine.add_request(prompts[len(late)], params)] = now - start - request.seconds / speed
        if engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
        else:
            time.sleep(max(start + waiting[0].seconds / speed - time.perf_counter(), 0))
    return [(outputs[request_id], seconds) for request_id, seconds in late.items()]


def summary(llm: LLM, all_served: Served, seconds: float) -> dict:
    served = [(output, late) for output, late in all_served if output.error is None]
    first = [(output.metrics.time_to_first_token + late) * 1e3 for output, late in served]
    each = [
        (output.metrics.total_time - output.metrics.time_to_first_token) * 1e3 / (len(output.token_ids) - 1)
        for output, _ in served
        if len(output.token_ids) > 1
    ]
    stats = llm.manager.stats()
    return {
        "requests": len(all_served),
        "refused": len(all_served) - len(served),
        "seconds": seconds,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output, _ in served),
        "hit_tokens": stats["hit_tokens"],
        "new_tokens": sum(len(output.token_ids) for output, _ in served),
        "preemptions": llm.scheduler.queues.num_preemptions,
        "first_token_ms": {f"p{p}": float(np.percentile(first, p)) for p in (50, 90, 99)},
        "token_ms": {f"p{p}": float(np.percentile(each, p)) for p in (50, 90, 99)},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines, see traces.py")
    parser.add_argument("--model", default="0.6B", choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60, help="of the trace, from its start (default: 60)")
    parser.add_argument("--speed", type=float, default=1, help="how much faster than it was recorded (default: 1)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096, help="tokens of a step (default: 4096)")
    args = parser.parse_args()
    if args.trace:
        requests = traces.load_requests(args.trace)
    else:
        requests = traces.generate_requests(np.random.default_rng(0), 200)
    requests = [request for request in requests if request.seconds < args.seconds]
    with tempfile.TemporaryDirectory() as scratch:
        folder = nano_bench.write_shape(args.model, Path(scratch))
        options = {"max_num_seqs": 64, "max_num_batched_tokens": args.max_num_batched_tokens}
        llm = LLM(folder, device=args.device, load_format="dummy", **options)
    with llm:
        llm.generate([[1] * 5000, [2] * 100], SamplingParams(max_tokens=4), use_tqdm=False)  # warms up
        llm.manager.reset_prefix_cache()
        start = time.perf_counter()
        served = serve(llm, requests, args.speed)
        row = summary(llm, served, time.perf_counter() - start)
    row |= {"model": args.model, "speed": args.speed, "max_num_batched_tokens": args.max_num_batched_tokens}
    print(
        f"{row['requests']} requests in {row['seconds']:.1f} s ({row['refused']} refused), "
        f"{row['prompt_tokens']:,} prompt tokens, {row['hit_tokens'] / row['prompt_tokens']:.0%} of them cached, "
        f"{row['new_tokens']:,} new tokens, {row['preemptions']} preemptions"
    )
    for name, key in (("first token", "first_token_ms"), ("a token", "token_ms")):
        print(f"{name:<12}" + ", ".join(f"{p} {ms:.1f} ms" for p, ms in row[key].items()))
    if args.trace:
        record_run(args, f"serve_trace-{args.device}", [row], args.device, trace=args.trace.name)


if __name__ == "__main__":
    main()

"""Where the time of a decode step with small weights goes: graphs of it without some of its calls.

    python benchmarks/lab/linear/quantised_step.py [--model 8B-int4] [--rows 1] [--keys 384]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2]))
from small_weights import MODELS, write_model

from pagedkv import Graph, ops
from pagedkv.cli import nano_bench

linear = ops.linear


def nothing(*args: Any, **options: Any) -> Any:
    return options.get("out")


def after_a_norm(x: Any, weight: Any, **options: Any) -> Any:
    """linear, whose norm is a kernel of its own."""
    norm, normed = options.pop("norm", None), options.pop("normed", None)
    if norm is not None:
        x = ops.rms_norm(x, norm, options.pop("rms_eps"), out=normed)
    return linear(x, weight, **options)


def of_others(x: Any, weight: Any, **options: Any) -> Any:
    """linear of weights that are not quantised."""
    return options["out"] if options.get("weight_scales") is not None else linear(x, weight, **options)


def seconds(graph: Graph, device: str) -> float:
    means = []
    for _ in range(5):
        ops.synchronize(device)
        start = time.perf_counter()
        for _ in range(20):
            graph.replay()
        ops.synchronize(device)
        means.append((time.perf_counter() - start) / 20)
    return min(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B-int4", choices=MODELS)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--keys", type=int, default=384)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        llm = nano_bench.make_llm(
            write_model(args.model, Path(scratch)), nano_bench.make_workload(), device="cuda", load_format="dummy",
            **{"max_model_len": 4352} | MODELS[args.model][1],
        )  # fmt: skip
    with llm:
        runner = llm._runner
        batch = runner.memory.long_decodes(args.rows, args.keys, runner.manager.num_blocks)
        forms = {
            "all of it": {"linear": linear},
            "norms as kernels": {"linear": after_a_norm},
            "no attention": {"qkv_attention_fwd": nothing},
            "no quantised products": {"linear": of_others},
            "none of both": {"qkv_attention_fwd": nothing, "linear": of_others},
        }
        graphs = {}
        for name, functions in forms.items():
            graphs[name] = Graph()
            with runner.stream, patch.multiple(ops, **functions):
                runner._compute(batch)
                with graphs[name].capture(runner.stream):
                    runner._compute(batch)
        graphs["no head"] = Graph()
        with runner.stream, graphs["no head"].capture(runner.stream):
            runner.forward(batch, batch.last_tokens)
        for name, graph in graphs.items():
            with runner.stream:
                took = 1e6 * seconds(graph, "cuda")
            shape = f"{args.model}, {args.rows} rows, {args.keys} keys"
            print(f"{shape}, {name}: {took:,.0f} us, {graph.num_nodes} nodes", flush=True)


if __name__ == "__main__":
    main()

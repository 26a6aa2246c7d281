"""What a training loop waits for: new weights in place, sleep and wake_up. Random weights, bfloat16.

    python benchmarks/training.py [--models 0.6B 8B] [--device cuda] [--runs 5]

update  seconds of update_weights from torch's tensors on the device, and from the host's
sleep   seconds of sleep and of wake_up by level, and the device's memory in use before and while it sleeps

The tokens of a few prompts must be the same before and after. Writes results/training-<device>.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import make_parser, record_run

from pagedkv import LLM, SamplingParams, ops
from pagedkv.cli import nano_bench

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = [[i + j for j in range(100)] for i in range(16)]


def timed(device: str, call: Callable[..., object], *args: Any) -> float:
    """Seconds until the device has done it, too."""
    ops.synchronize(device)
    start = time.perf_counter()
    call(*args)
    ops.synchronize(device)
    return time.perf_counter() - start


def tokens(llm: LLM) -> list[list[int]]:
    llm.reset_prefix_cache()  # a prompt that is partly cached is computed in other parts, and rounded otherwise
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not [output.error for output in outputs if output.error]
    return [output.token_ids for output in outputs]


def used_gb(device: str) -> float:
    free, total = ops.memory_info(device)
    return round((total - free) / 1e9, 2)


def random_tensors(size: str, device: str) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint of Qwen3."""
    hidden, intermediate, layers, q_heads, kv_heads, is_tied = nano_bench.SHAPES[size]
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": 128, "self_attn.k_norm": 128}
    products = {
        "self_attn.q_proj": (q_heads * 128, hidden), "self_attn.k_proj": (kv_heads * 128, hidden),
        "self_attn.v_proj": (kv_heads * 128, hidden), "self_attn.o_proj": (hidden, q_heads * 128),
        "mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate),
    }  # fmt: skip
    vocabulary = {"model.embed_tokens": (151936, hidden)} | ({} if is_tied else {"lm_head": (151936, hidden)})
    shapes = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in products.items()} | vocabulary
    ones = {f"model.layers.{i}.{name}": count for i in range(layers) for name, count in norms.items()} | {"model.norm": hidden}
    given = {f"{name}.weight": 0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return given | {f"{name}.weight": torch.ones(count, device=device, dtype=torch.bfloat16) for name, count in ones.items()}


def measure_updates(llm: LLM, size: str, device: str, runs: int) -> dict:
    given = random_tensors(size, device)
    row = {"gb": round(sum(each.nbytes for each in given.values()) / 1e9, 2)}
    expected = None
    for name, where in (("device", device), ("host", "cpu")):
        tensors = {each: tensor.to(where) for each, tensor in given.items()}
        row[name] = statistics.median(timed(device, llm.update_weights, tensors) for _ in range(runs))
        found = tokens(llm)
        assert expected in (None, found), "the same weights, other tokens"
        expected = found
    return row


def measure_sleep(llm: LLM, device: str, runs: int) -> list[dict]:
    rows, expected = [], tokens(llm)
    for level in (1, 2):
        times, before = [], used_gb(device)
        for _ in range(runs):
            asleep = timed(device, llm.sleep, level)
            while_asleep = used_gb(device)
            times.append((asleep, timed(device, llm.wake_up, ["weights"]), timed(device, llm.wake_up, ["kv_cache"])))
        sleep, weights, cache = (float(each) for each in np.median(times, 0))
        rows.append({"level": level, "sleep": sleep, "wake_weights": weights, "wake_cache": cache,
                     "used_gb": before, "asleep_gb": while_asleep})  # fmt: skip
        assert level == 2 or tokens(llm) == expected
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B", "8B"], choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for size in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = nano_bench.write_shape(size, Path(scratch))
            sizes = {"max_model_len": 4096, "gpu_memory_utilization": 0.6}  # the tensors lie beside it
            llm = LLM(folder, device=args.device, load_format="dummy", **sizes)
        with llm:
            tokens(llm)  # what is done at the first use
            rows.append({"model": size, "update": measure_updates(llm, size, args.device, args.runs),
                         "sleep": measure_sleep(llm, args.device, args.runs)})  # fmt: skip
            print(rows[-1], flush=True)
    record_run(args, f"training-{args.device}", rows, args.device)


if __name__ == "__main__":
    main()

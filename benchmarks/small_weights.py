"""Models with experts and models in small weights, random ones, beside one in 16 bits.

    python benchmarks/small_weights.py [--models 8B 8B-fp8 8B-fp8-kv8 8B-int4 30B-A3B] [--device cuda] [--runs 2]
                                       [--parts one nano prefill]

one      tokens/s of a request alone: 128 tokens in, 512 out
nano     tokens/s of 256 requests at once (pagedkv/cli/nano_bench.py)
prefill  tokens/s of 16 prompts of 4,096 tokens at once, with a token out each

fp8 is `quantization="fp8"`; int4 has groups of 128 without zeros; kv8 is a cache in fp8. Medians of the runs behind one that
warms up. Writes results/small-weights-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import figures
from rates import Rates
from record import make_parser, record_run

from pagedkv.cli import nano_bench

INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}}},
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # by name: keys of config.json beside those of 8B, options of LLM
    "8B": ({}, {}),
    "8B-fp8": ({}, {"quantization": "fp8"}),
    "8B-fp8-kv8": ({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "8B-int4": ({"quantization_config": INT4}, {}),
    "30B-A3B": (EXPERTS, {}),
}
PARTS = ("one", "nano", "prefill")
MAX_MODEL_LEN = 4352  # of a prompt, too, and more


def write_model(name: str, folder: Path) -> Path:
    path = nano_bench.write_shape("8B", folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | MODELS[name][0]))
    return folder


def rows(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    theirs = figures("vllm")["small_weights_tokens_per_second"].get(name, {})
    with tempfile.TemporaryDirectory() as scratch:
        llm = nano_bench.make_llm(
            write_model(name, Path(scratch)), nano_bench.make_workload(), device=args.device, load_format="dummy",
            **{"max_model_len": MAX_MODEL_LEN} | MODELS[name][1],
        )  # fmt: skip
    with llm:
        rates = Rates(llm)
        for part in args.parts:
            found = [getattr(rates, part)() for _ in range(args.runs + 1)][1:]
            median = statistics.median(found)
            print(f"{name} {part}: {median:,.1f} tokens/s; vLLM {theirs.get(part, 'was not measured')}", flush=True)
            yield {"model": name, "part": part, "tokens_per_second": median, "runs": found, "vllm": theirs.get(part)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=2, help="of each part, behind the first (default: 2)")
    args = parser.parse_args()
    found = [row for name in args.models for row in rows(name, args)]
    record_run(args, f"small-weights-{args.device}", found, args.device)


if __name__ == "__main__":
    main()

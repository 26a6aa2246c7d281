"""From a folder of weights in the page cache to the first token: each start in a process of its own.

    python benchmarks/start.py [--models 8B] [--quantization fp8] [--device cuda] [--runs 3] [--folder /dev/shm/start]

The folder gets the files of a model of random weights in bfloat16, in shards of about 4 GB, and is removed afterwards. The
first run measures products that the cache of choices (PAGEDKV_CACHE_DIR) does not have; the others know them. Printed of
each run: seconds until the package is imported, until the engine is ready, and until the first token of a prompt of 128;
the most memory of the host; and what the engine logs of its start.

Writes results/start-<device>-<model>[-<quantization>].json.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from record import make_parser, record_run

from pagedkv.cli import nano_bench

SHARD_BYTES = 4 << 30
START = """
import json, logging, resource, sys, time
start = time.perf_counter()
from pagedkv import LLM, SamplingParams
imported = time.perf_counter() - start
logging.basicConfig(level=logging.INFO, format="  %(relativeCreated)6.0f ms  %(message)s", stream=sys.stderr)
llm = LLM(sys.argv[1], max_model_len=4096, **json.loads(sys.argv[2]))
ready = time.perf_counter() - start
(output,) = llm.generate([[7] * 128], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
assert output.error is None, output.error
first = time.perf_counter() - start
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"imported": imported, "ready": ready, "first_token": first, "host_bytes": host}))
llm.close()
"""


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a Qwen3."""
    hidden, middle, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        layer |= {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        layer |= {"self_attn.o_proj": (hidden, q), "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        layer |= {"mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden), "mlp.down_proj": (hidden, middle)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_weights(folder: Path) -> int:
    """Shards and their index; the bytes of all."""
    shapes = shapes_of(json.loads((folder / "config.json").read_text()))
    normal = np.random.default_rng(0).standard_normal(16 << 20, np.float32) * np.float32(0.02)
    pool = (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bfloat16, cut off
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(map(math.prod, shards[-1].values())) * 2 > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    names = {}
    for number, shard in enumerate(shards):
        path, header, end = folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors", {}, 0
        for name, shape in shard.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            names[name] = path.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for first in range(0, end, len(pool)):
                file.write(pool[: end - first])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return 2 * sum(map(math.prod, shapes.values()))


def start(folder: Path, options: dict) -> dict:
    command = [sys.executable, "-c", START, str(folder), json.dumps(options)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    print(run.stderr, flush=True)
    if run.returncode:
        raise SystemExit(f"the start failed with exit code {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["8B"], choices=nano_bench.SHAPES)
    parser.add_argument("--quantization", help="as the option of LLM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files go (default: the folder of temporary files)")
    args = parser.parse_args()
    options = {"device": args.device} | ({"quantization": args.quantization} if args.quantization else {})
    for model in args.models:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            folder = nano_bench.write_shape(model, Path(scratch))
            row = {"model": model, "bytes": write_weights(folder), "runs": []}
            for _ in range(args.runs):
                row["runs"].append(start(folder, options))
                print(model, {key: round(value, 2) for key, value in row["runs"][-1].items()}, flush=True)
        name = f"start-{args.device}-{model}" + (f"-{args.quantization}" if args.quantization else "")
        record_run(args, name, [row], args.device)


if __name__ == "__main__":
    main()

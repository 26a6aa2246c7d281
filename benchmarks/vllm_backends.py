#!/usr/bin/env python3
"""vLLM's own LLM on one card with the attention backends FLASH_ATTN and PAGEDKV, one after the other: tokens, then time.

    python benchmarks/vllm_backends.py [--model 0.6B] [--dtype bfloat16] [--kv-cache-dtype auto] [--backends FLASH_ATTN PAGEDKV]
                                       [--parts check nano c64 one] [--options '{"max_num_batched_tokens": 512}']

Writes benchmarks/results/vllm-<model>.json, where all options but the model's are the usual ones.

Needs vLLM. Each backend has a process of its own (60 to 100 s to its start). Rows are JSON lines on stdout.

check      greedy tokens and logprobs of prompts of 1 to 3,000 tokens, some with a shared prefix, all at once, then again
           (from the prefix cache); and logprobs of given text (prompt_logprobs). The last row compares the first backend
           with the second: equal tokens, logprob differences up to where two requests part, and the gap between the
           two best tokens there.
invariant  each prompt alone and all together: bits of the logprobs (with --env VLLM_BATCH_INVARIANT=1)
nano       nano-vllm's 256 requests: 142,827 prompt and 133,966 new tokens
c64        64 requests of 512 prompt and 256 new tokens at once
one        one request of 128 prompt and 512 new tokens: tokens/s of batch 1

Weights are random, of the size that makes attention matter, from one seed; above 1.7B vLLM's dummy ones (nearly 0),
where `check` says little. The entry point: where no installed distribution has it, a dist-info folder is made and put on
PYTHONPATH, with the checkout of pagedkv that is importable.
"""

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import make_parser, record, version

SHAPES = {  # hidden, intermediate, layers, query heads, KV heads, head_dim, tied embeddings, vocabulary
    "0.6B": (1024, 3072, 28, 16, 8, 128, True, 151936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, True, 151936),
    "8B": (4096, 12288, 36, 32, 8, 128, False, 151936),
}
PARTS = "check", "invariant", "nano", "c64", "one"


def write_model(model: str, dtype: str, folder: Path, device: str) -> bool:
    """config.json and, up to 1.7B, weights. Whether there are weights."""
    hidden, intermediate, layers, heads, kv_heads, dim, is_tied, vocab = SHAPES[model]
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=40960, max_window_layers=layers,
        rms_norm_eps=1e-6, rope_theta=1_000_000, rope_scaling=None, hidden_act="silu", attention_bias=False,
        attention_dropout=0.0, initializer_range=0.02, use_cache=True, sliding_window=None, use_sliding_window=False,
        tie_word_embeddings=is_tied, torch_dtype=dtype, bos_token_id=1, eos_token_id=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if model not in ("0.6B", "1.7B"):
        return False
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    to = getattr(torch, dtype)

    def normal(*shape, scale):
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(to).cpu()

    def ones(n, value=1.0):
        return torch.full((n,), value, dtype=to)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, scale=hidden**-0.5 * 2), "model.norm.weight": ones(hidden)}
    if not is_tied:
        weights["lm_head.weight"] = normal(vocab, hidden, scale=hidden**-0.5 * 2)
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, rows, columns, scale in [
            ("self_attn.q_proj", heads * dim, hidden, 1), ("self_attn.k_proj", kv_heads * dim, hidden, 1),
            ("self_attn.v_proj", kv_heads * dim, hidden, 1), ("self_attn.o_proj", hidden, heads * dim, 1),
            ("mlp.gate_proj", intermediate, hidden, 1), ("mlp.up_proj", intermediate, hidden, 1),
            ("mlp.down_proj", hidden, intermediate, 0.5),
        ]:
            weights[f"{at}{name}.weight"] = normal(rows, columns, scale=scale * columns**-0.5)
        for name, n, value in [("self_attn.q_norm", dim, 1.5), ("self_attn.k_norm", dim, 1.5),
                               ("input_layernorm", hidden, 1), ("post_attention_layernorm", hidden, 1)]:
            weights[f"{at}{name}.weight"] = ones(n, value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return True


def write_entry_point(folder: Path) -> list[str]:
    """Folders for PYTHONPATH that make vLLM find the plugin in each of its processes."""
    if any(each.name == "pagedkv" for each in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return []
    import pagedkv

    info = folder / "entry" / f"pagedkv-{pagedkv.__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pagedkv\nVersion: {pagedkv.__version__}\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npagedkv = pagedkv.integrations.vllm:register\n")
    return [str(info.parent), str(Path(pagedkv.__file__).parents[1])]


def device_state(worker) -> list[str]:
    """Run in vLLM's worker: what pagedkv's kernels have recorded, and which attention runs."""
    from pagedkv import ops

    ops.check_errors()
    layers = worker.model_runner.compilation_config.static_forward_context
    return sorted({type(layer.impl).__module__ + "." + type(layer.impl).__name__ for layer in layers.values()})


class Engine:
    def __init__(self, args):
        import vllm

        self.vllm, self.args, self.rng = vllm, args, random.Random(12345)
        settings = dict(
            model=args.folder, skip_tokenizer_init=True, dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=4096, attention_backend=args.engine, gpu_memory_utilization=0.9, seed=0,
        )
        if not Path(args.folder, "model.safetensors").exists():
            settings["load_format"] = "dummy"
        self.largest_id = min(10_000, SHAPES[args.model][-1] - 1)
        start = time.perf_counter()
        self.llm = vllm.LLM(**settings | args.options)
        config = self.llm.llm_engine.vllm_config.compilation_config
        self.emit(part="start", seconds=time.perf_counter() - start, vllm=vllm.__version__,
                  cudagraph_mode=str(config.cudagraph_mode), capture_sizes=len(config.cudagraph_capture_sizes or []),
                  attention=self.llm.collective_rpc(device_state), card=card())

    def emit(self, **row):
        shared = dict(backend=self.args.engine, model=self.args.model, dtype=self.args.dtype,
                      kv_cache_dtype=self.args.kv_cache_dtype, options=self.args.options, env=self.args.env)
        line = json.dumps(shared | row)
        print(line, flush=True)
        with open(self.args.rows, "a") as file:
            file.write(line + "\n")

    def prompts(self, count, length):
        return [[self.rng.randint(0, self.largest_id) for _ in range(length)] for _ in range(count)]

    def empty_cache(self):
        deadline = time.monotonic() + 2
        while not self.llm.reset_prefix_cache() and time.monotonic() < deadline:
            time.sleep(0.01)

    def run(self, prompts, lengths, temperature=0.6, **more):
        params = [
            self.vllm.SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False, **more)
            for n in lengths
        ]
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def timed(self, prompts, lengths):
        self.empty_cache()
        start = time.perf_counter()
        outputs = self.run(prompts, lengths)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        return seconds

    def report(self, part, tokens, times):
        median = statistics.median(times)
        self.emit(part=part, tokens=tokens, runs=len(times), tokens_s=round(tokens / median, 1),
                  best_tokens_s=round(tokens / min(times), 1), seconds=[round(each, 4) for each in times])

    def check_prompts(self):
        shared = self.prompts(1, 700)[0]
        lengths = (1, 5, 33, 200, 511, 1000, 3000)
        return [self.prompts(1, n)[0] for n in lengths] + [shared + self.prompts(1, n)[0] for n in (1, 17, 300)]

    def check(self):
        prompts, rows = self.check_prompts(), []
        self.empty_cache()
        for _ in range(2):
            outputs = self.run(prompts, [48] * len(prompts), temperature=0, logprobs=2)
            rows.append([self.row_of(output) for output in outputs])
        text = self.prompts(6, 300)
        outputs = self.run(text, [1] * len(text), temperature=0, prompt_logprobs=0)
        given = [[next(iter(each.values())).logprob if len(each) == 1 else each[token].logprob
                  for token, each in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])] for output in outputs]
        self.emit(part="check", first=rows[0], again=rows[1], given=given)

    @staticmethod
    def row_of(output):
        best = output.outputs[0]
        ranked = [sorted((each.logprob for each in at.values()), reverse=True) for at in best.logprobs]
        return dict(tokens=list(best.token_ids), cached=output.num_cached_tokens, gaps=[at[0] - at[1] for at in ranked],
                    logprobs=[at[token].logprob for token, at in zip(best.token_ids, best.logprobs)])

    def invariant(self):
        prompts = self.check_prompts()
        self.empty_cache()
        together = [self.row_of(output) for output in self.run(prompts, [32] * len(prompts), temperature=0, logprobs=2)]
        alone = []
        for prompt in prompts:
            self.empty_cache()
            alone.append(self.row_of(self.run([prompt], [32], temperature=0, logprobs=2)[0]))
        equal = sum(a["tokens"] == b["tokens"] and a["logprobs"] == b["logprobs"] for a, b in zip(alone, together))
        self.emit(part="invariant", equal_bits=equal, of=len(prompts))

    def nano(self):
        rng = random.Random(0)
        prompts = [[min(rng.randint(0, 10_000), self.largest_id) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
        lengths = [rng.randint(100, 1024) for _ in range(256)]
        self.timed(prompts, lengths)
        self.report("nano", sum(lengths), [self.timed(prompts, lengths) for _ in range(self.args.runs)])

    def c64(self):
        self.timed(self.prompts(64, 512), [8] * 64)
        self.report("c64", 64 * 256, [self.timed(self.prompts(64, 512), [256] * 64) for _ in range(self.args.runs)])

    def one(self):
        self.timed(self.prompts(1, 128), [512])
        self.report("one", 512, [self.timed(self.prompts(1, 128), [512]) for _ in range(self.args.runs + 2)])


def card() -> str:
    query = ["nvidia-smi", "--query-gpu=name,clocks.sm,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()


def compare(rows: list[dict], backends: list[str]) -> dict:
    """The first backend's `check` beside the second's."""
    first, second = (next(row for row in rows if row["part"] == "check" and row["backend"] == each) for each in backends)
    result = dict(part="compare", backends=backends)
    for key in ("first", "again"):
        equal, differences, gaps = 0, [0.0], []
        for a, b in zip(first[key], second[key], strict=True):
            n = next((i for i, pair in enumerate(zip(a["tokens"], b["tokens"])) if pair[0] != pair[1]), len(a["tokens"]))
            equal += n == len(a["tokens"])
            differences += [abs(x - y) for x, y in zip(a["logprobs"][:n], b["logprobs"][:n])]
            gaps += [round(a["gaps"][n], 5)] if n < len(a["tokens"]) else []
        result[key] = dict(equal_requests=f"{equal} of {len(first[key])}", worst_logprob=max(differences),
                           mean_logprob=statistics.mean(differences), gap_where_they_part=gaps)
    result["cached"] = [[r["cached"] for r in first["again"]], [r["cached"] for r in second["again"]]]
    given = [abs(x - y) for a, b in zip(first["given"], second["given"]) for x, y in zip(a, b, strict=True)]
    result["given"] = dict(worst_logprob=max(given), mean_logprob=statistics.mean(given), count=len(given))
    return result


def parse_args():
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--dtype", default="bfloat16", help="float32: FLASH_ATTN has none, take TRITON_ATTN beside PAGEDKV")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--backends", nargs="+", default=["FLASH_ATTN", "PAGEDKV"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["check", "nano", "c64", "one"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of more arguments of LLM()")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="for vLLM's processes")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.engine:
        engine = Engine(args)
        for part in args.parts:
            getattr(engine, part)()
        engine.emit(part="end", attention=engine.llm.collective_rpc(device_state), card=card())
        return
    with tempfile.TemporaryDirectory() as folder:
        import torch

        model, rows_file = Path(folder, "model"), Path(folder, "rows.jsonl")
        write_model(args.model, args.dtype, model, "cuda")
        torch.cuda.empty_cache()
        environment = os.environ | dict(each.split("=", 1) for each in args.env)
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # device_state goes to the worker
        paths = [*write_entry_point(Path(folder)), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for backend in args.backends:
            command = [sys.executable, __file__, *sys.argv[1:], "--engine", backend, "--folder", str(model), "--rows", str(rows_file)]
            if (code := subprocess.run(command, env=environment).returncode) != 0:
                print(json.dumps(dict(part="failed", backend=backend, code=code)), flush=True)
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
        checked = {row["backend"] for row in rows if row["part"] == "check"}
        if len(args.backends) == 2 and checked == set(args.backends):
            rows.append(compare(rows, args.backends))
            print(json.dumps(rows[-1]), flush=True)
    is_usual = (args.dtype, args.kv_cache_dtype, args.options, args.env) == ("bfloat16", "auto", {}, [])
    if is_usual and not args.no_record:  # the tokens of a check are too many to keep
        kept = [row for row in rows if row["part"] != "check"]
        record(f"vllm-{args.model}", kept, machine={"gpu": card()}, versions={"vllm": version("vllm"), "torch": version("torch")})


if __name__ == "__main__":
    main()

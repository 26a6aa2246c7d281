"""nano-vllm on pagedkv's page allocator, cache store and attention, without a change to its files.

    git clone https://github.com/GeeeekExplorer/nano-vllm       # run so far: commit bb823b3
    python examples/nano_vllm.py nano-vllm [--model FOLDER] [--size 0.6B] [--runs 3] [--eager]

Before nano-vllm is imported, pagedkv's modules take the names that it imports: flash_attn is
pagedkv.compat.flash_attn, nanovllm.engine.block_manager is pagedkv.compat.nanovllm; flash-attn and xxhash need not be
installed. Then the workload of its bench.py runs: 256 requests of 100 to 1,024 prompt and 100 to 1,024 new tokens,
drawn with seed 0, after runs with other seeds that warm it up. Without FOLDER (a Qwen3 model) a model of that size with
random weights does the same work.

It needs a GPU, as nano-vllm does.
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pagedkv.compat.flash_attn
import pagedkv.compat.nanovllm
from pagedkv import ops
from pagedkv.cli import nano_bench


def put_in_place(checkout: str) -> None:
    """Makes `import nanovllm` load the checkout's files, with pagedkv's modules under the names that they import."""
    if not Path(checkout, "nanovllm").is_dir():
        raise SystemExit(f"{checkout} is no checkout of nano-vllm: it has no folder nanovllm")
    sys.path.insert(0, checkout)
    sys.modules["flash_attn"] = pagedkv.compat.flash_attn
    sys.modules["nanovllm.engine.block_manager"] = pagedkv.compat.nanovllm
    # Their store is a Triton kernel in the file of the layer that calls it: only its name in that module can be taken,
    # because their torch.compile needs the real Triton.
    attention = importlib.import_module("nanovllm.layers.attention")
    attention.store_kvcache = pagedkv.compat.nanovllm.store_kvcache


def write_model(size: str, folder: Path) -> Path:
    """A model's folder without weights: Qwen3 of this size, and a tokenizer whose tokens are bytes."""
    nano_bench.write_shape(size, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Weights as of an untrained model; those of norms are 1 already. In place: CUDA graphs have their addresses."""
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.02)


def run_bench(llm, sampling_params: type, num_runs: int) -> None:
    """Fresh prompts in every run, as nothing of them may be in the prefix cache; the last run is bench.py's own."""
    for seed in reversed(range(num_runs)):
        workload = nano_bench.make_workload(seed=seed)
        params = [
            sampling_params(temperature=0.6, ignore_eos=True, max_tokens=each.max_tokens) for each in workload.params
        ]
        start = time.perf_counter()
        outputs = llm.generate(workload.prompts, params, use_tqdm=False)
        seconds, tokens = time.perf_counter() - start, workload.num_new_tokens
        assert sum(len(output["token_ids"]) for output in outputs) == tokens
        print(f"seed {seed}: {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--model", help="a folder with a Qwen3 model; random weights without it")
    parser.add_argument("--size", default="0.6B", choices=nano_bench.SHAPES, help="of the model with random weights")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("nano-vllm runs on a GPU, and PyTorch finds none")
    put_in_place(options.checkout)
    from nanovllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_model(options.size, Path(folder))
        llm = LLM(str(model), enforce_eager=options.eager, max_model_len=4096)
    if not options.model:
        torch.manual_seed(0)
        randomize(llm.model_runner.model)
    run_bench(llm, SamplingParams, options.runs)
    ops.check_errors()


if __name__ == "__main__":
    main()

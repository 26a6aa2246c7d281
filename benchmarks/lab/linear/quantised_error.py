"""What quantised weights cost in accuracy: the model in the package, as it is and in every format.

    PYTHONPATH=.:tests python benchmarks/lab/linear/quantised_error.py [--device cuda] [--prompts 64]

For each format: the relative L2 error of a layer's products for random x, weights alone, mean and worst; then, over all
positions of sums that the model was trained to complete, the Kullback-Leibler divergence of its distribution from that of
16-bit weights, mean and worst, and the share of positions whose likeliest token is the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from model_oracle import record_logits
from quantized_checkpoints import FORMATS, PROJECTIONS, Format, compressed, int4, safetensors_bytes

from pagedkv import LLM, SamplingParams, asarray
from pagedkv.cli.demo import DEMO_MODEL
from pagedkv.models.safetensors import SafetensorsFile

NAMES = ("fp8", "fp8, channel", "fp8, tensor", "packed")  # those with zeros are drawn for their edge cases
LARGE = "packed, groups of 128"
PACKED = compressed("int", 4, "group", "pack-quantized", group_size=128)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: asarray(file.tensor(name), "float32").numpy() for name in file.entries}


def write(folder: Path, form: Format, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model with quantised products, and the values of these."""
    tensors, values = {}, {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(PROJECTIONS):
            matrix = form.quantise(weight.astype(np.float64))
            tensors |= {f"{module}.{last}": each for last, each in matrix.tensors.items()}
            values[name] = matrix.values
        else:
            tensors[name] = weight
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {"quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    return values


def logits_of(folder: Path, prompts: list[str], device: str, **options: object) -> np.ndarray:
    """[positions, vocabulary], of the prompts, whose ends are what the model should say."""
    with LLM(folder, device=device, block_size=4, num_blocks=2048, enforce_eager=True, enable_prefix_caching=False, **options) as llm:
        recorded = record_logits(llm)
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        return np.concatenate([logits for i in range(len(prompts)) for _, logits in recorded[i]]).astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def products_error(weights: dict[str, np.ndarray], values: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    errors = []
    for name, value in values.items():
        x = rng.standard_normal((256, value.shape[1]))
        exact = x @ weights[name].T.astype(np.float64)
        errors.append(np.linalg.norm(x @ value.T - exact) / np.linalg.norm(exact))
    return np.array(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=64)
    args = parser.parse_args()
    rng, weights = np.random.default_rng(0), weights_of(DEMO_MODEL)
    sums = rng.integers(0, 1000, (args.prompts, 2)).tolist()
    prompts = [f"{a}+{b}={a + b}" for a, b in sums]
    expected = log_softmax(logits_of(DEMO_MODEL, prompts, args.device, dtype="float32"))

    def show(name: str, errors: np.ndarray | None, logits: np.ndarray) -> None:
        found = log_softmax(logits)
        divergence = (np.exp(expected) * (expected - found)).sum(-1)
        same = (expected.argmax(-1) == found.argmax(-1)).mean()
        products = "      -       -" if errors is None else f"{errors.mean():7.4f} {errors.max():7.4f}"
        print(f"{name:28} {products}   {divergence.mean():.2e} {divergence.max():.2e}   {same:.4f}", flush=True)

    print(f"{'':28} rel-L2, worst      KL, worst             same   ({len(expected)} positions)")
    show("as it is, bfloat16", None, logits_of(DEMO_MODEL, prompts, args.device))
    for name in [*NAMES, LARGE]:
        form = FORMATS[name] if name != LARGE else Format(int4("compressed-tensors", 128), PACKED)
        with tempfile.TemporaryDirectory() as scratch:
            values = write(Path(scratch), form, weights)
            show(name, products_error(weights, values, rng), logits_of(Path(scratch), prompts, args.device))


if __name__ == "__main__":
    main()

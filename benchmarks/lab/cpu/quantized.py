"""ms of a layer's four products, weights cold: bfloat16, float8 in blocks of 128 x 128, int4 in groups of 128 and 32.

    python benchmarks/lab/cpu/quantized.py 0.6B 1 4 16 64 512

Best of several, in turns, because other processes of a machine change all figures.
"""

import sys
import time

import numpy as np

from pagedkv import asarray, empty, ops

LAYERS = {  # outputs, inputs of a layer's products; how many layers lie in memory
    "0.6B": ([(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], 8),
    "8B": ([(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)], 1),
}


def make(rng, kind: str, outputs: int, size: int) -> dict:
    if kind.startswith("int4"):
        scales = rng.uniform(0.01, 0.02, (outputs, size // int(kind[5:]))).astype(np.float32)
        packed = rng.integers(0, 256, (outputs, size // 2), np.uint8)
        return {"weight": packed, "weight_scales": asarray(scales, "float16")}
    numbers = rng.standard_normal((outputs, size), np.float32)
    if kind == "bfloat16":
        return {"weight": asarray(numbers / size**0.5, "bfloat16")}
    scales = rng.uniform(1e-4, 2e-4, (-(-outputs // 128), -(-size // 128))).astype(np.float32)
    return {"weight": asarray(100 * numbers, "float8_e4m3fn"), "weight_scales": scales, "weight_block": (128, 128)}


def main() -> None:
    shapes, num_layers = LAYERS[sys.argv[1]]
    rng, kinds = np.random.default_rng(0), ("bfloat16", "float8", "int4 128", "int4 32")
    layers = {kind: [[make(rng, kind, *shape) for shape in shapes] for _ in range(num_layers)] for kind in kinds}
    for rows in map(int, sys.argv[2:]):
        x = {size: asarray(rng.standard_normal((rows, size), np.float32), "bfloat16") for _, size in shapes}
        out = {outputs: empty((rows, outputs), "bfloat16") for outputs, _ in shapes}
        best = dict.fromkeys(kinds, float("inf"))
        for _ in range(max(3, int(12 * num_layers**0.5 / rows**0.5))):
            for kind in kinds:
                start = time.perf_counter()
                for layer in layers[kind]:
                    for (outputs, size), weight in zip(shapes, layer, strict=True):
                        ops.linear(x[size], out=out[outputs], **weight)
                best[kind] = min(best[kind], (time.perf_counter() - start) / num_layers)
        print(f"{rows} rows:", ", ".join(f"{kind} {1000 * ms:.2f} ms" for kind, ms in best.items()), flush=True)


if __name__ == "__main__":
    main()

"""`linear` on one GPU: the products of a decode step as the chain that a step is, beside torch.mm and the floor.

    python benchmarks/linear_cuda.py [--models 0.6B,8B] [--rows 1,8,16,64] [--alone] [--no-record]

CUDA graphs over the weights of all layers (of 8B: of six, scaled to 36), measured as in dense_cuda.py. A step's products feed
each other, with the gate, its division and the residual that they do on the way and without attention; the LM head writes float32.
`floor` is the weights' bytes at what an H200 reads at best (peers.json). Weights are promised to be constant, as the engine does.
"""


import torch
from dense_cuda import ROTATE_BYTES, VOCAB, Call, measure, normal
from peers import figures
from record import make_parser, record_run

from pagedkv import ops

READ_BYTES_PER_US = figures("floor")["read_gb_per_s"] * 1e3
SHAPES = {  # outputs, inputs
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate-up": (6144, 1024), "down": (1024, 3072), "LM head": (VOCAB, 1024)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (24576, 4096), "down": (4096, 12288), "LM head": (VOCAB, 4096)},
}
LAYERS, MEASURED_LAYERS = {"0.6B": 28, "8B": 36}, {"0.6B": 28, "8B": 6}


def by_pagedkv(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    ops.linear(x, weight, out=out, weight_is_constant=True)


def by_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def buffer(rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, size, device="cuda", dtype=dtype)


def product_us(shape: tuple[int, int], rows: int, linear) -> float:
    outputs, size = shape

    def make() -> Call:
        x, weight, out = normal(rows, size), normal(outputs, size) / size**0.5, buffer(rows, outputs)
        return lambda _: linear(x, weight, out)

    return measure("product", make, 2 * outputs * size)["us"]


def step_us(model: str, rows: int, is_fused: bool) -> float:
    """All layers, then the LM head. Fused: with the gate, its division by the root mean square, and the residual. (torch.mm:
    the products alone, logits of half the bytes.)"""
    shapes, count = SHAPES[model], MEASURED_LAYERS[model]
    weights = [{name: normal(*shape) / shape[1] ** 0.5 for name, shape in shapes.items() if name != "LM head"} for _ in range(count)]
    head, hidden, middle = normal(*shapes["LM head"]), shapes["qkv"][1], shapes["down"][1]
    outs = {name: buffer(rows, outputs) for name, (outputs, _) in shapes.items() if name != "LM head"}
    logits = buffer(rows, VOCAB, torch.float32 if is_fused else torch.bfloat16)
    x, activation = normal(rows, hidden), buffer(rows, middle)
    attention = outs["qkv"][:, : shapes["o"][1]]
    always = {"weight_is_constant": True}

    def fused() -> None:
        for layer in weights:
            ops.linear(x, layer["qkv"], out=outs["qkv"], **always)
            ops.linear(attention, layer["o"], add_to_out=True, out=x, **always)
            ops.linear(x, layer["gate-up"], gate_up=outs["gate-up"], rms_eps=1e-6, out=activation, **always)
            ops.linear(activation, layer["down"], add_to_out=True, out=x, **always)

    def products() -> None:
        for layer in weights:
            by_torch(x, layer["qkv"], outs["qkv"])
            by_torch(attention, layer["o"], outs["o"])
            by_torch(outs["o"], layer["gate-up"], outs["gate-up"])
            by_torch(outs["gate-up"][:, :middle], layer["down"], outs["down"])

    def alone(run) -> float:
        return measure("chain", lambda: lambda _: run(), ROTATE_BYTES)["us"]

    linear = by_pagedkv if is_fused else by_torch
    return alone(fused if is_fused else products) * LAYERS[model] / count + alone(lambda: linear(x, head, logits))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="0.6B,8B")
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--alone", action="store_true", help="each product alone, too")
    options = parser.parse_args()
    results = []
    for model in options.models.split(","):
        for rows in map(int, options.rows.split(",")):
            cases = SHAPES[model] if options.alone else {}
            bytes_of = {name: 2 * outputs * size for name, (outputs, size) in SHAPES[model].items()}
            head = bytes_of.pop("LM head")
            row = {"case": f"{model} step, {rows} rows", "rows": rows, "bytes": LAYERS[model] * sum(bytes_of.values()) + head,
                   "us": round(step_us(model, rows, True), 2), "us_torch": round(step_us(model, rows, False), 2)}  # fmt: skip
            found = [row] + [
                {"case": f"{model} {name} {shape[0]}x{shape[1]}, {rows} rows", "rows": rows, "bytes": 2 * shape[0] * shape[1],
                 "us": product_us(shape, rows, by_pagedkv), "us_torch": product_us(shape, rows, by_torch)}
                for name, shape in cases.items()
            ]  # fmt: skip
            for row in found:
                row["us_floor"] = round(row["bytes"] / READ_BYTES_PER_US, 2)
                print(f"{row['case']:40} {row['us']:9.2f} us  floor {row['us_floor']:8.2f}  torch.mm {row['us_torch']:9.2f}", flush=True)
            results += found
            torch.cuda.empty_cache()
    record_run(options, "linear-cuda", results, peers={"us_torch": "torch.mm, cuBLAS by its default choice"})


if __name__ == "__main__":
    main()

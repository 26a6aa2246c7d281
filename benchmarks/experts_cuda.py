"""`moe_mlp` and `expert_linear` on one GPU: the experts of Qwen3 30B-A3B's layers beside torch._grouped_mm and the floor.

    python benchmarks/experts_cuda.py [--tokens 1,2,4,8,16,64,256,2048] [--no-record]

CUDA graphs over four layers (4.8 GB of weights), measured as in dense_cuda.py; each layer has a random routing of its own. A layer
is moe_mlp: the router's product, route_experts, the gated product and the weighed sum, which is added to the residual; `us` is its
time, `us_products` that of the last two as calls of their own. `floor` is the bytes of the experts that the tokens have, at what an H200 reads at best (peers.json).
torch._grouped_mm multiplies rows that are ordered by expert already: no routing, no gate and no sum are in its time.
"""


import torch
from dense_cuda import ROTATE_BYTES, measure, normal
from peers import figures
from record import make_parser, record_run

from pagedkv import ops

READ_BYTES_PER_US = figures("floor")["read_gb_per_s"] * 1e3
HIDDEN, SIZE, EXPERTS, CHOSEN, LAYERS = 2048, 768, 128, 8, 4
EXPERT_BYTES = 3 * HIDDEN * SIZE * 2


def make_layers() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Weights of the router, of gates and ups, and of downs."""
    shapes = (EXPERTS, HIDDEN), (EXPERTS, 2 * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE)
    return [tuple(normal(*shape) / shape[-1] ** 0.5 for shape in shapes) for _ in range(LAYERS)]


def us_of(run) -> float:
    return measure("layers", lambda: lambda _: run(), ROTATE_BYTES)["us"] / LAYERS


def measure_tokens(layers, tokens: int) -> dict:
    x, residual = normal(tokens, HIDDEN), normal(tokens, HIDDEN)
    act = torch.empty(tokens, CHOSEN, SIZE, device="cuda", dtype=torch.bfloat16)
    routes = [(torch.empty(tokens, CHOSEN, device="cuda", dtype=torch.int32), torch.empty(tokens, CHOSEN, device="cuda")) for _ in layers]
    logits = torch.empty(tokens, EXPERTS, device="cuda")
    always = {"weight_is_constant": True, "add_to_out": True, "out": residual}

    def all_of() -> None:
        for (router, up, down), (experts, weights) in zip(layers, routes, strict=True):
            ops.moe_mlp(x, router, up, down, normalize=True, logits=logits, experts=experts, weights=weights, activation=act, **always)

    def products() -> None:
        for (_, up, down), (experts, weights) in zip(layers, routes, strict=True):
            ops.expert_linear(x, up, experts, gated=True, out=act, weight_is_constant=True)
            ops.expert_linear(act, down, experts, weights=weights, experts_are_constant=True, **always)

    all_of()
    torch.cuda.synchronize()
    counts = [torch.bincount(experts.flatten().long(), minlength=EXPERTS) for experts, _ in routes]
    ends = [count.cumsum(0).to(torch.int32) for count in counts]
    rows, middle = normal(tokens * CHOSEN, HIDDEN), normal(tokens * CHOSEN, SIZE)

    def by_torch() -> None:
        for (_, up, down), end in zip(layers, ends, strict=True):
            torch._grouped_mm(rows, up.transpose(1, 2), offs=end)
            torch._grouped_mm(middle, down.transpose(1, 2), offs=end)

    used = sum(int((count > 0).sum()) for count in counts) / LAYERS
    return {
        "case": f"30B-A3B experts, {tokens} tokens",
        "tokens": tokens,
        "experts": used,
        "bytes": used * EXPERT_BYTES,
        "us": round(us_of(all_of), 2),
        "us_products": round(us_of(products), 2),
        "us_torch": round(us_of(by_torch), 2),
        "us_floor": round(used * EXPERT_BYTES / READ_BYTES_PER_US, 2),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default="1,2,4,8,16,64,256,2048")
    options = parser.parse_args()
    layers, results = make_layers(), []
    for tokens in map(int, options.tokens.split(",")):
        row = measure_tokens(layers, tokens)
        results.append(row)
        print(f"{row['case']:32} {row['us']:9.2f} us, products {row['us_products']:9.2f}  floor {row['us_floor']:8.2f} "
              f"({row['experts']:.1f} experts)  torch._grouped_mm {row['us_torch']:9.2f}", flush=True)  # fmt: skip
    peers = {"us_torch": "torch._grouped_mm, the two products alone, of rows that are ordered already"}
    record_run(options, "experts-cuda", results, peers=peers)


if __name__ == "__main__":
    main()

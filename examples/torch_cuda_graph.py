"""A decode loop in PyTorch whose step is one torch.cuda.CUDAGraph, captured once and replayed for every token.

    python examples/torch_cuda_graph.py [--device cuda] [--seed 0]

A graph repeats the same kernels on the same addresses. So whatever changes from step to step (token ids, slots,
lengths, block tables) lies in tensors that stay where they are, and new values are copied into them. The plan of
attention is made inside the graph, once for all layers: every replay plans for the lengths that it finds.
Prompts run without a graph. On the CPU, which has no graphs, the same step runs eagerly.

All logits are compared with those of plain PyTorch attention in float32. pytorch_loop.py shows continuous batching.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

import pagedkv

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, VOCAB_SIZE = 8, 2, 64, 256, 3, 500
BLOCK_SIZE, NUM_BLOCKS, MAX_BATCH, MAX_BLOCKS = 16, 64, 4, 8
QKV, OUT = ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM)
SHAPES = [(VOCAB_SIZE, HIDDEN), (MAX_BLOCKS * BLOCK_SIZE, HIDDEN), (VOCAB_SIZE, HIDDEN), *[QKV, OUT] * LAYERS]
TOLERANCE = 0.1  # of logits with a standard deviation of 1, computed in bfloat16


def model(weights: list[torch.Tensor], ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
    """Logits of ids at their positions. `attend(layer, q, k, v)` is all that paged and plain attention differ in."""
    words, places, head, *layers = weights
    x = (words[ids] + places[positions]) * HIDDEN**0.5
    for layer, (qkv, out) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
        heads = F.linear(F.rms_norm(x, (HIDDEN,)), qkv).view(len(x), HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        x = x + F.linear(attend(layer, q, k, v).flatten(1), out)
    return F.linear(F.rms_norm(x, (HIDDEN,)), head)


def run(weights: list[torch.Tensor], caches: torch.Tensor, ids, slots, positions, lens, tables) -> torch.Tensor:
    """The logits of ids, whose keys and values are stored first. Each sequence (row of tables) has as many ids."""
    plan = None

    def attend(layer, q, k, v):
        nonlocal plan
        pagedkv.store_kvcache(k, v, *caches[layer], slots)
        if plan is None:
            plan = pagedkv.plan_attention(q, *caches[layer], tables, lens)
        return pagedkv.paged_attention_fwd(q, *caches[layer], tables, lens, plan=plan)

    return model(weights, ids, positions, attend)


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What does the work of step() each time that it is called: the replay of a graph; step itself on the CPU."""
    if device.type == "cpu":
        return step
    step()  # kernels and libraries are loaded at their first use, which must not be the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def generate(weights: list[torch.Tensor], prompts: list[list[int]], num_new: list[int]) -> list[list[torch.Tensor]]:
    """The logits of every new token of each prompt. The token is the largest of them."""
    manager, device = pagedkv.BlockManager(NUM_BLOCKS, BLOCK_SIZE), weights[0].device
    caches = weights[0].new_zeros(LAYERS, 2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    ids, slots, positions, lens = torch.zeros(4, MAX_BATCH, dtype=torch.int32, device=device)
    tables = torch.zeros(MAX_BATCH, MAX_BLOCKS, dtype=torch.int32, device=device)
    fixed, out = (ids, slots.fill_(-1), positions, lens, tables), weights[0].new_zeros(MAX_BATCH, VOCAB_SIZE)
    decode, logits = captured(lambda: out.copy_(run(weights, caches, *fixed)), device), [[] for _ in prompts]

    def inputs(sequences: list[int]) -> list[torch.Tensor]:
        """What `run` takes, for the tokens that are not computed yet."""
        starts = [manager.num_computed(i) for i in sequences]
        ids = [manager.token_ids(i)[start:] for i, start in zip(sequences, starts, strict=True)]
        step = manager.prepare(sequences, starts, [len(each) for each in ids], max_blocks=MAX_BLOCKS)
        return [torch.from_numpy(each).to(device) for each in (np.concatenate(ids), *step[:3], step.block_tables)]

    def take(i: int, row: torch.Tensor) -> None:
        manager.commit(i, manager.num_tokens(i))
        logits[i].append(row.float())
        if len(logits[i]) < num_new[i]:
            manager.append(i, int(row.argmax()))
        else:
            manager.free(i)

    for i, prompt in enumerate(prompts):
        manager.allocate(i, prompt)
        take(i, run(weights, caches, *inputs([i]))[-1])
    while running := [i for i in range(len(prompts)) if i in manager]:
        count = len(running)
        for tensor, values in zip(fixed, inputs(running), strict=True):
            tensor[:count] = values
        slots[count:], lens[count:] = -1, 0  # rows that no sequence needs: nothing is stored, no key is read
        decode()
        for i, row in zip(running, out[:count], strict=True):
            take(i, row)
    return logits


def plain_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    prompts = [torch.randint(VOCAB_SIZE, (n,)).tolist() for n in (5, 37, 16, 70)]
    weights = [(torch.randn(shape, device=options.device) / shape[1] ** 0.5).bfloat16() for shape in SHAPES]
    print("no graph: the step runs eagerly on the CPU" if options.device == "cpu" else "one graph for all steps")
    exact = [weight.float() for weight in weights]
    for prompt, rows in zip(prompts, generate(weights, prompts, [30, 8, 17, 25]), strict=True):
        ids = torch.tensor(prompt + [int(row.argmax()) for row in rows[:-1]], device=options.device)
        expected = model(exact, ids, torch.arange(len(ids), device=options.device), plain_attention)
        error = float((torch.stack(rows) - expected[len(prompt) - 1 :]).abs().max())
        print(f"{len(prompt):2} tokens, {len(rows):2} new ones: logits within {error:.3f} of float32")
        if not error < TOLERANCE:
            raise SystemExit(f"the logits differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()

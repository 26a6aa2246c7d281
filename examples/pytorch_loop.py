"""A continuous-batching loop written by hand in PyTorch, with pagedkv's pages and attention.

    python examples/pytorch_loop.py [--device cuda] [--num-prompts 8] [--seed 0]

The model is a small random decoder. Requests of different lengths are prefilled in one step and decoded together; one
that ends gives its pages back and the next one takes its place. In the end the tokens are compared with those of plain
PyTorch, which computes every prompt anew for each token.
"""

import argparse

import torch
from torch.nn import functional as F

import pagedkv

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, VOCAB_SIZE = 8, 2, 32, 128, 3, 500
BLOCK_SIZE, NUM_BLOCKS, MAX_BATCH = 16, 64, 4


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [num_tokens, heads, HEAD_DIM], in the order of Llama."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Decoder:
    """`attend(layer, q, k, v)` is all that paged and plain attention differ in."""

    def __init__(self, device: str) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device) / shape[-1] ** 0.5

        self.embedding = weight(VOCAB_SIZE, HIDDEN) * HIDDEN**0.5
        self.head = weight(VOCAB_SIZE, HIDDEN)
        self.qkv = [weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in range(LAYERS)]
        self.out = [weight(HIDDEN, HEADS * HEAD_DIM) for _ in range(LAYERS)]

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """[num_tokens, VOCAB_SIZE] of ids [num_tokens] at their positions."""
        x = self.embedding[ids]
        for layer in range(LAYERS):
            qkv = F.linear(F.rms_norm(x, (HIDDEN,)), self.qkv[layer]).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
            attended = attend(layer, rotate(q, positions), rotate(k, positions), v)
            x = x + F.linear(attended.reshape(len(x), -1), self.out[layer])
        return F.rms_norm(x, (HIDDEN,)) @ self.head.T


def serve(model: Decoder, prompts: list[list[int]], num_new: list[int], device: str) -> list[list[int]]:
    """The greedy continuation of every prompt, MAX_BATCH at a time: the pool holds that many of the longest."""
    manager = pagedkv.BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    caches = torch.zeros(LAYERS, 2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device)
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting, running = list(range(len(prompts))), []
    while waiting or running:
        starts = [len(prompts[i]) + len(outputs[i]) - 1 for i in running]  # one new token each
        lengths = [1] * len(running)
        while waiting and len(running) < MAX_BATCH:
            i = waiting.pop(0)
            starts.append(manager.allocate(i, prompts[i]))  # tokens that the prefix cache has already
            lengths.append(len(prompts[i]) - starts[-1])
            running.append(i)
        arrays = manager.prepare(running, starts, lengths)
        slots, positions, lens, cu_seqlens, tables = (torch.from_numpy(each).to(device) for each in arrays[:5])
        ids: list[int] = []
        for i, start, n in zip(running, starts, lengths, strict=True):
            ids += (prompts[i] + outputs[i])[start : start + n]

        def attend(layer, q, k, v, slots=slots, lens=lens, cu_seqlens=cu_seqlens, tables=tables):
            k_cache, v_cache = caches[layer]
            pagedkv.store_kvcache(k, v, k_cache, v_cache, slots)
            return pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables, lens, cu_seqlens_q=cu_seqlens)

        logits = model.logits(torch.tensor(ids, device=device), positions, attend)
        sampled = logits[cu_seqlens[1:].long() - 1].argmax(1).tolist()
        for i, start, n, token in zip(list(running), starts, lengths, sampled, strict=True):
            manager.commit(i, start + n)
            outputs[i].append(token)
            if len(outputs[i]) == num_new[i]:
                manager.free(i)
                running.remove(i)
            else:
                manager.append(i, token)
    return outputs


def recompute(model: Decoder, prompt: list[int], num_new: int, device: str) -> list[int]:
    """The same tokens from PyTorch alone."""

    def attend(layer, q, k, v):
        heads_first = (each.transpose(0, 1)[None] for each in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    tokens = list(prompt)
    for _ in range(num_new):
        ids = torch.tensor(tokens, device=device)
        tokens.append(int(model.logits(ids, torch.arange(len(ids), device=device), attend)[-1].argmax()))
    return tokens[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = Decoder(options.device)
    prompts = [torch.randint(VOCAB_SIZE, (5 + 13 * i % 50,)).tolist() for i in range(options.num_prompts)]
    num_new = [4 + 7 * i % 12 for i in range(options.num_prompts)]
    with torch.inference_mode():
        outputs = serve(model, prompts, num_new, options.device)
        expected = [recompute(model, *each, options.device) for each in zip(prompts, num_new, strict=True)]
    for prompt, output, wanted in zip(prompts, outputs, expected, strict=True):
        print(f"{len(prompt):3} tokens -> {output} {'as PyTorch' if output == wanted else f'but PyTorch has {wanted}'}")
    if outputs != expected:
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()

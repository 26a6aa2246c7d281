"""The attention of a Hugging Face model, swapped by hand for pagedkv's pages.

    python examples/hugging_face_attention.py [FOLDER] [--device cuda] [--seed 0]

Without FOLDER (a Qwen3 model) a small one with random weights is made. Every layer's `self_attn` is replaced by a
module that keeps its projections and norms, writes new keys and values into pages, and reads them from there: no past
is concatenated, no batch is padded. Prompts of different lengths are prefilled as one row of tokens and decoded
together. The tokens are compared with those of the model as it was, by its own `generate`, one prompt at a time.
"""

import argparse
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import pagedkv

BLOCK_SIZE, NUM_BLOCKS = 16, 64


@dataclass
class Batch:
    """The arrays of one step, which all layers read."""

    slots: torch.Tensor
    positions: torch.Tensor
    lens: torch.Tensor
    cu_seqlens: torch.Tensor
    tables: torch.Tensor


class PagedAttention(torch.nn.Module):
    """Takes the place of a Qwen3Attention; `step` is set before the model is called."""

    step: Batch

    def __init__(self, layer: torch.nn.Module, num_kv_heads: int, like: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        shape = NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, layer.head_dim
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, position_embeddings, **unused):
        layer, step, heads = self.layer, self.step, (1, hidden_states.shape[1], -1, self.layer.head_dim)
        q = layer.q_norm(layer.q_proj(hidden_states).view(heads)).transpose(1, 2)
        k = layer.k_norm(layer.k_proj(hidden_states).view(heads)).transpose(1, 2)
        q, k = (each[0].transpose(0, 1) for each in apply_rotary_pos_emb(q, k, *position_embeddings))
        pagedkv.store_kvcache(k, layer.v_proj(hidden_states).view(heads)[0], self.k_cache, self.v_cache, step.slots)
        out = pagedkv.paged_attention_fwd(
            q, self.k_cache, self.v_cache, step.tables, step.lens,
            cu_seqlens_q=step.cu_seqlens, softmax_scale=layer.scaling,
            window_size=(layer.sliding_window - 1 if layer.sliding_window else -1, -1),
        )  # fmt: skip
        return layer.o_proj(out.flatten(1))[None], None


def swap(model: torch.nn.Module) -> None:
    for decoder in model.model.layers:
        decoder.self_attn = PagedAttention(decoder.self_attn, model.config.num_key_value_heads, model.lm_head.weight)


def generate(model: torch.nn.Module, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """The greedy continuation of all prompts by the swapped model."""
    device, manager = model.device, pagedkv.BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    numbers = list(range(len(prompts)))
    starts = [manager.allocate(i, prompt) for i, prompt in enumerate(prompts)]  # tokens that the pages hold already
    lengths = [len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)]
    ids = [token for prompt, start in zip(prompts, starts, strict=True) for token in prompt[start:]]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_new):
        step = Batch(*(torch.from_numpy(each).to(device) for each in manager.prepare(numbers, starts, lengths)[:5]))
        PagedAttention.step = step
        hidden = model.model(
            input_ids=torch.tensor([ids], device=device), position_ids=step.positions.long()[None], use_cache=False
        ).last_hidden_state[0]
        ids = model.lm_head(hidden[step.cu_seqlens[1:].long() - 1]).argmax(1).tolist()
        for i, token in enumerate(ids):
            outputs[i].append(token)
            manager.commit(i, starts[i] + lengths[i])
            manager.append(i, token)
        starts, lengths = [start + n for start, n in zip(starts, lengths, strict=True)], [1] * len(numbers)
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if options.folder:
        model = AutoModelForCausalLM.from_pretrained(options.folder)
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8,
                num_key_value_heads=2, head_dim=32, initializer_range=0.3, eos_token_id=None, pad_token_id=None,
            )
        )  # fmt: skip
    model = model.to(options.device).eval()
    prompts = [torch.randint(model.config.vocab_size, (n,)).tolist() for n in (1, 5, 33, 16, 47)]
    with torch.inference_mode():
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=options.device)
            tokens = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
            expected.append(tokens[0, len(prompt) :].tolist())
        swap(model)
        outputs = generate(model, prompts, 12)
    for prompt, output, wanted in zip(prompts, outputs, expected, strict=True):
        print(f"{len(prompt):3} tokens -> {output} {'as before' if output == wanted else f'but {wanted} before'}")
    if outputs != expected:
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()

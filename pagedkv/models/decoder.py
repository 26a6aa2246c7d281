"""A decoder: the model of which every family here is a form. The tokens of all sequences lie in one ragged batch
[num_tokens, ...], and nothing is allocated in the loop.

    x = embedding(ids)
    every layer:    x += attention(norm(x));   x += mlp(norm(x))
    logits = head(norm(x)[the last token of every sequence])

x is called residual. linear can add to its output, so a layer whose norms are folded (see layers.py) is five calls, and
with few tokens on a GPU five kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pagedkv import Tensor, ops

from . import ITEM_BYTES
from .adapter import Adapter
from .buffers import Buffers
from .config import DecoderConfig
from .head import Head
from .layers import MLP, Attention, Block, GatedMLP, window_size
from .linear import Linear, TensorSource, tune
from .lora import LoraPart
from .rope import cos_sin_table
from .share import ranges_of
from .spec import Batch
from .weight import Weight


class Layer(NamedTuple):
    attention: Attention
    mlp: MLP


def memory_for_squares(layer: Layer, buffers: Buffers) -> Tensor | None:
    """For the squares of buffers.residual, where a norm is folded and both products that add to it leave them in
    passing: in the memory of normed. A norm that is not folded writes there while nobody needs them."""
    if all(block.norm is not None for block in layer):
        return None
    width, other = (block.squares_width(buffers) for block in layer)
    if width == 0 or width != other:
        return None
    shape = num_tokens, count = len(buffers.normed), buffers.normed.shape[1] // width
    return buffers.normed.view(buffers.normed.nbytes, "uint8")[: num_tokens * count * 4].view(shape, "float32")


class Decoder:
    """The whole model: see spec.Model. `max_model_len` is the size of the rotary table.

    The names of tensors are those of the library transformers. A family with other names has its own make_layer(), one
    with another MLP its own make_mlp(), and both name the kinds of their blocks.
    """

    def __init__(self, config: DecoderConfig, source: TensorSource, max_model_len: int) -> None:
        self.config, self.dtype, self.device = config, source.dtype, source.device
        table = cos_sin_table(config.rope, config.head_dim, max_model_len)
        cos_sin = ops.asarray(table, device=source.device)
        self.eps = config.rms_norm_eps
        self.comm, rows = source.comm, config.vocab_rows
        self.batch_invariant = source.batch_invariant
        self.embedding = source.load("model.embed_tokens.weight", rows, config.hidden_size)
        # Of several ranks: where its rows begin.
        self._first_row = None if self.comm is None else ranges_of(rows)[0][0]
        self.layers: list[Layer] = []
        for i in range(len(config.kv_layers)):
            if self.comm is not None:
                self.comm.check()  # to read on may take long, and be in vain
            self.layers.append(self.make_layer(i, source, cos_sin))
        self.norm = source.load("model.norm.weight", config.hidden_size)
        self.has_head = config.tie_word_embeddings or source.has_head
        if config.tie_word_embeddings or not self.has_head:  # without a head the embedding stands in, and is not used
            head = Linear(Weight(self.embedding), batch_invariant=source.batch_invariant)
        else:
            head = source.linear({"lm_head": rows}, config.hidden_size)
        self.head = Head(head, rows, config.vocab_size, self.comm)
        blocks: list[Block] = [block for layer in self.layers for block in layer]
        linears = [linear for block in blocks for linear in (*block.into_new, *block.into_residual)]
        self.lora: dict[str, LoraPart] = {part.name: part for linear in linears for part in linear.lora}
        # A tied model may hold its head a second time.
        is_tied = config.tie_word_embeddings
        source.check_all_used({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})

    def make_layer(self, index: int, source: TensorSource, cos_sin: Tensor) -> Layer:
        config, name = self.config, f"model.layers.{index}"
        kept, norm = config.kv_layers[index], f"{name}.input_layernorm"
        attention = Attention(config, source, cos_sin, kept, name=f"{name}.self_attn", norm=norm)
        mlp = self.make_mlp(index, source, name=f"{name}.mlp", norm=f"{name}.post_attention_layernorm")
        return Layer(attention, mlp)

    def make_mlp(self, index: int, source: TensorSource, *, name: str, norm: str) -> MLP:
        return GatedMLP(self.config, source, name=name, norm=norm)

    @classmethod
    def blocks(cls, config: DecoderConfig) -> tuple[type[Block], ...]:
        """Their kinds: the buffers that they need are allocated."""
        return Attention, GatedMLP

    @classmethod
    def buffer_sizes(cls, config: DecoderConfig) -> dict[str, int]:
        """The numbers of a token in each of the buffers."""
        sizes = {"residual": config.hidden_size, "normed": config.hidden_size}
        if config.vocab_share is not None:  # one of several ranks
            sizes["partial"] = config.hidden_size
        for block in cls.blocks(config):
            sizes |= {name: max(size, sizes.get(name, 0)) for name, size in block.buffer_sizes(config).items()}
        return sizes

    @classmethod
    def buffer_bytes(cls, config: DecoderConfig, dtype: str) -> int:
        sizes = cls.buffer_sizes(config).items()
        return sum(size * ITEM_BYTES[Buffers.DTYPES.get(name, dtype)] for name, size in sizes)

    def allocate_buffers(self, num_tokens: int) -> Buffers:
        def memory(name: str, size: int) -> Tensor:
            return ops.empty((num_tokens, size), Buffers.DTYPES.get(name, self.dtype), self.device)

        return Buffers({name: memory(name, size) for name, size in self.buffer_sizes(self.config).items()})

    def allocate_plans(self, num_tokens: int, num_seqs: int) -> dict[tuple[int, int], Tensor]:
        heads, group = self.config.num_kv_heads, self.config.num_q_heads // self.config.num_kv_heads
        num_rows = num_seqs * (1 + heads) + -(-num_tokens * group * (8 + heads) // 64) + 5120  # see plan_attention
        windows = {window_size(layer.window) for layer in self.config.kv_layers}
        return {window: ops.empty((num_rows, 12), "int32", self.device) for window in windows}

    def tune(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> None:
        if self.batch_invariant:
            return  # there is nothing to choose: cuBLASLt's algorithms answer none of its products
        blocks: list[Block] = [layer.attention for layer in self.layers] + [layer.mlp for layer in self.layers]
        tune([each for block in blocks for each in block.into_new], num_tokens, self.dtype)
        into_residual = [each for block in blocks for each in block.into_residual]
        tune(into_residual, num_tokens, self.dtype, add_to_out=self.comm is None)
        tune([self.head.linear], num_rows, self.dtype, out_dtype="float32")

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, int]]:
        return {name: part.shape for name, part in self.lora.items()}

    def write_adapter(self, slot: int, adapter: Adapter) -> None:
        for name, part in self.lora.items():
            part.write(slot, adapter.matrices.get(name))

    def forward(
        self,
        batch: Batch,
        caches: Sequence[tuple[Tensor, Tensor]],
        buffers: Buffers,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """After attention the last layer has last_tokens only."""
        used = buffers.first(len(batch.token_ids))
        if batch.has_adapters:
            used.adapter_slots = batch.adapter_slots
        ops.embedding(batch.token_ids, self.embedding, first_row=self._first_row, out=used.residual)
        if self.comm is not None:  # the other ranks' rows are zeros here
            ops.all_reduce(used.residual, self.comm, out=used.residual)
        self._plan(batch, *caches[0], used)
        left: Tensor | None = None
        memory: dict[type[MLP], Tensor | None] = {}  # layers are alike but for the kind of their MLP
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            layer.attention.forward(batch, k_cache, v_cache, used, left)
            if last_tokens is not None and layer is self.layers[-1]:
                used, memory = buffers.only(last_tokens), {}
                if batch.has_adapters:
                    used.adapter_slots = batch.row_adapter_slots
            kind = type(layer.mlp)
            if kind not in memory:
                memory[kind] = memory_for_squares(layer, used)
            squares = memory[kind]
            layer.attention.project(used, squares)
            layer.mlp.forward(used, squares)
            left = squares
        return ops.rms_norm(used.residual, self.norm, self.eps, out=used.normed)

    def _plan(self, batch: Batch, k_cache: Tensor, v_cache: Tensor, buffers: Buffers) -> None:
        q = self.layers[0].attention.heads(buffers.q)
        for window, plan in batch.plans.items():
            ops.plan_attention(
                q, k_cache, v_cache, batch.block_tables, batch.context_lens, cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q, window_size=window, batch_invariant=self.batch_invariant, out=plan,
            )  # fmt: skip

    def step_arguments(self, caches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        if self.batch_invariant or self.dtype != "bfloat16" or self.comm is not None:
            raise ValueError("the model must be of one GPU, in bfloat16 and not batch-invariant")
        arguments: dict[str, Any] = {"embedding": self.embedding, "norm": self.norm, "eps": self.eps}
        arguments["head"] = self.head.linear.plain_weight("head")
        of_attention = "qkv_weights", "o_weights", "q_norms", "k_norms", "k_caches", "v_caches"
        lists: dict[str, list[Tensor]] = {name: [] for name in (*of_attention, "gate_up_weights", "down_weights")}
        for i, (layer, (k_cache, v_cache)) in enumerate(zip(self.layers, caches, strict=True)):
            of_layer = layer.attention.step_arguments(i) | layer.mlp.step_arguments(i)
            of_layer |= {"k_caches": k_cache, "v_caches": v_cache}
            for name, tensor in of_layer.items():
                lists[name].append(tensor)
        return arguments | lists | {"cos_sin": self.layers[0].attention.cos_sin}

    def allocate_logits(self, num_rows: int) -> Tensor:
        return self.head.allocate_logits(num_rows, self.device)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        return self.head.logits(hidden, out)

    def sample(
        self, hidden: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, logits: Tensor, out: Tensor
    ) -> Tensor:
        return self.head.sample(hidden, temperatures, seeds, positions, logits=logits, out=out)

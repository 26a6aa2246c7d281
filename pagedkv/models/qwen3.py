"""Qwen3 (dense): https://arxiv.org/abs/2505.09388.

One class per block. A block holds its weights and writes into buffers that the caller owns, so that nothing is
allocated in the loop. The tokens of all sequences lie in one ragged batch [num_tokens, ...].

    x = embedding(ids)
    every layer:    x += attention(norm(x));   x += mlp(norm(x))
    logits = head(norm(x)[the last token of every sequence])

x is called residual. A norm in a layer is no call of its own: its weight is multiplied into the weight of the next
product, and the reader of that product divides by the root mean square (see fold). With few tokens it finds the squares
of x where the product that made x has left them. linear can add to its output, so a layer is five calls, and with few
tokens on a GPU five kernels. Weights are promised to be constant: a kernel may fetch them before its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedkv import Tensor, ops

from .config import Qwen3Config
from .dummy import DummyCheckpoint
from .rope import cos_sin_table
from .spec import Batch
from .weights import Checkpoint

AnyCheckpoint = Checkpoint | DummyCheckpoint


@dataclass(frozen=True, slots=True)
class Buffers:
    """A step's memory: [num_tokens, size] each."""

    residual: Tensor  # hidden_size
    normed: Tensor  # hidden_size
    qkv: Tensor  # (num_q_heads + 2 * num_kv_heads) * head_dim
    q: Tensor  # num_q_heads * head_dim: the shape to plan for, and memory to swap with attention in only()
    attention: Tensor  # num_q_heads * head_dim
    gate_up: Tensor  # 2 * intermediate_size
    activation: Tensor  # intermediate_size

    def first(self, num_tokens: int) -> Buffers:
        """The same memory, cut to num_tokens rows."""
        return Buffers(*(getattr(self, name)[:num_tokens] for name in self.__slots__))

    def only(self, tokens: Tensor) -> Buffers:
        """Buffers for these tokens alone, with their residual and attention, whose memory is swapped with that of
        normed and q. A token may occur several times."""
        few = self.first(len(tokens))
        residual = ops.gather_rows(self.residual, tokens, out=few.normed)
        attention = ops.gather_rows(self.attention, tokens, out=few.q)
        return replace(few, residual=residual, normed=few.residual, attention=attention, q=few.attention)


def window_size(num_keys: int) -> tuple[int, int]:
    """window_size of attention for queries that see num_keys keys, their own included; 0: all."""
    return (num_keys - 1, 0) if num_keys else (-1, -1)


def fold(norm: Tensor, weight: Tensor) -> Tensor | None:
    """Multiplies a norm's weight into the weight of the next product, in place. Returns the norm that must still run
    before the product, or None: a row can as well be divided by its root mean square after the product.

    In float16 a product of rows that are not yet divided may be too large: there the norm stays what it is.
    """
    if weight.dtype == "float16":
        return norm
    ops.scale_columns(weight, norm, out=weight)
    return None


def memory_for_squares(layer: Layer, buffers: Buffers) -> Tensor | None:
    """For the squares of buffers.residual, where both products that add to it leave them in passing: in the memory of
    normed, which is not needed at the same time."""
    if buffers.residual.dtype == "float16":  # its norms are calls of their own (see fold)
        return None
    products = (buffers.attention, layer.attention.o_weight), (buffers.activation, layer.mlp.down_weight)
    width, other = (ops.linear_squares(x, weight, out=buffers.residual) for x, weight in products)
    if width == 0 or width != other:
        return None
    shape = num_tokens, count = len(buffers.normed), buffers.normed.shape[1] // width
    return buffers.normed.view(buffers.normed.nbytes, "uint8")[: num_tokens * count * 4].view(shape, "float32")


class Attention:
    def __init__(self, config: Qwen3Config, layer: int, checkpoint: AnyCheckpoint, cos_sin: Tensor) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.num_q_heads, self.head_dim, self.eps = config.num_q_heads, config.head_dim, config.rms_norm_eps
        self.window = window_size(config.windows[layer])
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_weight = checkpoint.load_stacked(
            {f"{prefix}.{name}.weight": count for name, count in rows.items()}, config.hidden_size
        )
        self.o_weight = checkpoint.load(f"{prefix}.o_proj.weight", config.hidden_size, q_size)
        self.qkv_bias = self.o_bias = None
        if config.attention_bias:
            self.qkv_bias = checkpoint.load_stacked({f"{prefix}.{name}.bias": count for name, count in rows.items()})
            self.o_bias = checkpoint.load(f"{prefix}.o_proj.bias", config.hidden_size)
        norm = checkpoint.load(f"model.layers.{layer}.input_layernorm.weight", config.hidden_size)
        self.norm = norm if config.attention_bias else fold(norm, self.qkv_weight)  # a bias comes after the division
        self.q_norm = checkpoint.load(f"{prefix}.q_norm.weight", config.head_dim)
        self.k_norm = checkpoint.load(f"{prefix}.k_norm.weight", config.head_dim)
        self.cos_sin = cos_sin

    def forward(
        self, batch: Batch, k_cache: Tensor, v_cache: Tensor, buffers: Buffers, squares: Tensor | None
    ) -> None:
        """buffers.attention = the heads of attention(norm(buffers.residual)); writes the tokens' KV into the caches.
        squares: of buffers.residual, where a product has left them."""
        heads = (len(buffers.q), self.num_q_heads, self.head_dim)
        out = buffers.attention.view(heads)
        x = buffers.residual
        if self.norm is not None:
            x = ops.rms_norm(x, self.norm, self.eps, out=buffers.normed)
        ops.linear(x, self.qkv_weight, self.qkv_bias, weight_is_constant=True, out=buffers.qkv)
        ops.qkv_attention_fwd(
            buffers.qkv,
            self.q_norm,
            self.k_norm,
            self.cos_sin,
            batch.positions,
            k_cache,
            v_cache,
            batch.slot_mapping,
            batch.block_tables,
            batch.context_lens,
            rms_of=x if self.norm is None else None,
            rms_squares=squares if self.norm is None else None,
            eps=self.eps,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            window_size=self.window,
            plan=batch.plans.get(self.window),
            past_is_constant=True,
            out=out,
        )

    def project(self, buffers: Buffers, squares: Tensor | None) -> None:
        """buffers.residual += buffers.attention, projected; leaves its squares"""
        ops.linear(
            buffers.attention,
            self.o_weight,
            self.o_bias,
            out_squares=squares,
            add_to_out=True,
            weight_is_constant=True,
            out=buffers.residual,
        )


class MLP:
    def __init__(self, config: Qwen3Config, layer: int, checkpoint: AnyCheckpoint) -> None:
        prefix = f"model.layers.{layer}.mlp"
        self.eps = config.rms_norm_eps
        rows = {f"{prefix}.{name}.weight": config.intermediate_size for name in ("gate_proj", "up_proj")}
        self.gate_up_weight = checkpoint.load_stacked(rows, config.hidden_size)
        norm = checkpoint.load(f"model.layers.{layer}.post_attention_layernorm.weight", config.hidden_size)
        self.norm = fold(norm, self.gate_up_weight)
        self.down_weight = checkpoint.load(f"{prefix}.down_proj.weight", config.hidden_size, config.intermediate_size)

    def forward(self, buffers: Buffers, squares: Tensor | None) -> None:
        """buffers.residual += mlp(norm(buffers.residual)); takes its squares and leaves them"""
        x = buffers.residual
        if self.norm is not None:
            x = ops.rms_norm(x, self.norm, self.eps, out=buffers.normed)
        ops.linear(
            x,
            self.gate_up_weight,
            gate_up=buffers.gate_up,
            rms_eps=self.eps if self.norm is None else None,
            x_squares=squares if self.norm is None else None,
            weight_is_constant=True,
            out=buffers.activation,
        )
        ops.linear(
            buffers.activation,
            self.down_weight,
            out_squares=squares,
            add_to_out=True,
            weight_is_constant=True,
            out=buffers.residual,
        )


class Layer:
    def __init__(self, config: Qwen3Config, layer: int, checkpoint: AnyCheckpoint, cos_sin: Tensor) -> None:
        self.attention = Attention(config, layer, checkpoint, cos_sin)
        self.mlp = MLP(config, layer, checkpoint)


class Qwen3:
    """The whole model: see spec.Model. `max_model_len` is the size of the rotary table."""

    def __init__(self, config: Qwen3Config, checkpoint: AnyCheckpoint, max_model_len: int) -> None:
        self.config, self.dtype, self.device = config, checkpoint.dtype, checkpoint.device
        table = cos_sin_table(config.rope, config.head_dim, max_model_len)
        cos_sin = ops.asarray(table, device=checkpoint.device)
        self.eps = config.rms_norm_eps
        self.embedding = checkpoint.load("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, i, checkpoint, cos_sin) for i in range(config.num_layers)]
        self.norm = checkpoint.load("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self.head = self.embedding
        else:
            self.head = checkpoint.load("lm_head.weight", config.vocab_size, config.hidden_size)
        # A tied model may hold its head a second time, and old files hold what the rotary table is made from.
        ignored = {"lm_head.weight"} | {name for name in checkpoint.files if name.endswith("rotary_emb.inv_freq")}
        checkpoint.check_all_used(ignored if config.tie_word_embeddings else ignored - {"lm_head.weight"})

    def allocate_buffers(self, num_tokens: int) -> Buffers:
        sizes = self.config.buffer_sizes
        return Buffers(*(ops.empty((num_tokens, size), self.dtype, self.device) for size in sizes))

    def allocate_plans(self, num_tokens: int, num_seqs: int) -> dict[tuple[int, int], Tensor]:
        heads, group = self.config.num_kv_heads, self.config.num_q_heads // self.config.num_kv_heads
        num_rows = num_seqs * (1 + heads) + -(-num_tokens * group * (8 + heads) // 64) + 5120  # see plan_attention
        windows = map(window_size, set(self.config.windows))
        return {window: ops.empty((num_rows, 12), "int32", self.device) for window in windows}

    def tune(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> None:
        def large(*weights: Tensor) -> list[Tensor]:
            return [weight for weight in weights if weight.nbytes >= 1 << 20]  # else the time is that of a launch

        attentions, mlps = [layer.attention for layer in self.layers], [layer.mlp for layer in self.layers]
        into_new = [each.qkv_weight for each in attentions] + [each.gate_up_weight for each in mlps]
        into_residual = [each.o_weight for each in attentions] + [each.down_weight for each in mlps]
        ops.tune_linear(large(*into_new), num_tokens)
        ops.tune_linear(large(*into_residual), num_tokens, add_to_out=True)
        ops.tune_linear(large(self.head), num_rows, out_dtype="float32")

    def forward(
        self,
        batch: Batch,
        caches: Sequence[tuple[Tensor, Tensor]],
        buffers: Buffers,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """After attention the last layer has last_tokens only."""
        used = buffers.first(len(batch.token_ids))
        ops.embedding(batch.token_ids, self.embedding, out=used.residual)
        self._plan(batch, *caches[0], used)
        left, squares = None, memory_for_squares(self.layers[0], used)
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):
            layer.attention.forward(batch, k_cache, v_cache, used, left)
            if last_tokens is not None and layer is self.layers[-1]:
                used = buffers.only(last_tokens)
                squares = memory_for_squares(layer, used)
            layer.attention.project(used, squares)
            layer.mlp.forward(used, squares)
            left = squares
        return ops.rms_norm(used.residual, self.norm, self.eps, out=used.normed)

    def _plan(self, batch: Batch, k_cache: Tensor, v_cache: Tensor, buffers: Buffers) -> None:
        attention = self.layers[0].attention
        q = buffers.q.view((len(buffers.q), attention.num_q_heads, attention.head_dim))
        for window, plan in batch.plans.items():
            ops.plan_attention(
                q,
                k_cache,
                v_cache,
                batch.block_tables,
                batch.context_lens,
                cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                window_size=window,
                out=plan,
            )

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        return ops.linear(hidden, self.head, weight_is_constant=True, out=out)

    def sample(
        self, hidden: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, logits: Tensor, out: Tensor
    ) -> Tensor:
        return ops.sample_linear(
            hidden, self.head, temperatures, seeds, positions, logits=logits, weight_is_constant=True, out=out
        )

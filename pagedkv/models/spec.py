"""What an engine may know of a model, and what it calls: the same for every family of models.

A family's own configuration is a Spec with more fields; registry.py lists the families.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from pagedkv import Tensor

from . import ITEM_BYTES
from .adapter import Adapter
from .weight import Part


class KVLayer(NamedTuple):
    """What a layer keeps of each token: so many keys, and as many values."""

    num_kv_heads: int
    head_dim: int
    window: int = 0  # how many keys a query sees, its own included; 0: all


class Quantization(ABC):
    """How the weights of products are quantised in a checkpoint, or while it is loaded. Its repr() says all of it."""

    name: str  # that of quantization_config.quant_method
    reads_joined_experts = False  # whether a tensor may hold all experts of a layer
    unit = 1, 1  # rows and columns of a weight that a rank's share has whole

    @property
    @abstractmethod
    def stores(self) -> tuple[str, ...]:
        """What the weights are in memory: "fp8", "int4", or both."""

    @abstractmethod
    def covers(self, name: str) -> bool | None:
        """Whether the weight of the product of this name is quantised; None: that is as the files have it."""

    @abstractmethod
    def read(self, source: Any, name: str, num_rows: int, in_features: int) -> Part:
        """Of a linear.TensorSource. Checks the shapes and dtypes of all that the product has."""


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    family: str  # its model_type: see registry.py
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    dtype: str  # of the files
    eos_token_ids: frozenset[int] = frozenset()
    quantization: Quantization | None = None

    @property
    @abstractmethod
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """By layer."""

    @property
    def max_positions(self) -> int:
        """The largest max_model_len."""
        return self.max_position_embeddings

    def shard(self, rank: int, num_ranks: int) -> Spec:
        """That of one of several ranks: numbers of which it has a share are Shares (see share.py). What every rank must
        know whole stays as it is."""
        raise NotImplementedError(f"tensor_parallel_size is {num_ranks}: {self.family} models are not split over ranks")

    def page_bytes(self, kv_cache_dtype: str, block_size: int) -> int:
        """Of a page of the KV cache: keys and values of all layers."""
        numbers = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.kv_layers)
        return numbers * block_size * ITEM_BYTES[kv_cache_dtype]

    def fingerprint(self) -> str:
        """A digest of all that the KV of a prompt depends on besides the weights, in hexadecimal."""
        kept = replace(self, eos_token_ids=frozenset())
        return hashlib.blake2b(repr(kept).encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class Batch:
    """What a model must know of a step: int32 arrays on its device (see BlockManager.prepare). They lie side by side in
    one piece of memory, which the next step overwrites."""

    token_ids: Any  # [num_tokens]; before forward(): -1 - r is the token in row r of the step before
    positions: Any  # [num_tokens]
    slot_mapping: Any  # [num_tokens], -1: the token's KV is in the cache already
    block_tables: Any  # [num_seqs, max_blocks]
    context_lens: Any  # [num_seqs]
    cu_seqlens_q: Any  # [num_seqs + 1]; None: max_seqlen_q tokens each
    max_seqlen_q: int
    plans: dict[tuple[int, int], Tensor]  # see Model.allocate_plans
    last_tokens: Any  # [num_rows]: the tokens after which one is sampled; None: all
    temperatures: Any  # float32 [num_rows]
    seeds: Any  # int64 [num_rows]
    next_positions: Any  # [num_rows], of the tokens to be sampled
    num_bytes: int  # of the arrays
    needs_logits: bool = False  # whether logits are written before anything is sampled
    keeps_hidden: bool = False  # whether the hidden states of all tokens are computed
    adapter_slots: Any = None  # [num_tokens]: see Model.write_adapter; None: there are no adapters
    row_adapter_slots: Any = None  # the same of last_tokens, or of all
    has_adapters: bool = False  # whether one of these is not -1


class Model(Protocol):
    """A model on its device. It allocates nothing in a step."""

    def __init__(self, spec: Any, source: Any, max_model_len: int) -> None:
        """See registry.load_model."""

    @classmethod
    def buffer_bytes(cls, spec: Any, dtype: str) -> int:
        """Of the memory of allocate_buffers(1) for activations of this dtype."""

    def allocate_buffers(self, num_tokens: int) -> Any:
        """Memory for steps of up to so many tokens."""

    def allocate_plans(self, num_tokens: int, num_seqs: int) -> dict[tuple[int, int], Tensor]:
        """Memory for attention's plans of a batch of up to this size (see plan_attention), by the windows of the
        layers. With it in the batch, forward() plans once for all layers; without, each call of attention does."""

    def tune(self, num_tokens: Sequence[int], num_rows: Sequence[int]) -> None:
        """Chooses how a GPU computes products of these numbers of tokens, and rows of logits: see ops.tune_linear."""

    def forward(
        self,
        batch: Batch,
        caches: Sequence[tuple[Tensor, Tensor]],
        buffers: Any,
        last_tokens: Tensor | None = None,
    ) -> Tensor:
        """Normed hidden states [num_tokens, hidden_size], in memory of `buffers`, of last_tokens (int32) or of all
        tokens. Writes the KV of all tokens into the caches."""

    def step_arguments(self, caches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """What ops.decode_step is to know of the model. ValueError: why it cannot compute it."""

    def allocate_logits(self, num_rows: int) -> Tensor:
        """Memory for the logits of so many rows, float32 [num_rows, vocab_size]."""

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Into the first rows of that memory."""

    def sample(
        self, hidden: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, logits: Tensor, out: Tensor
    ) -> Tensor:
        """The tokens that ops.sample draws from logits(hidden): int32 [num_rows]. `logits` is scratch memory."""


class AdaptedModel(Model, Protocol):
    """One that takes adapters, if the source of its tensors says how many: see linear.TensorSource.lora."""

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, int]]:
        """Those of the weights of the projections that an adapter may have something for, by name."""

    def write_adapter(self, slot: int, adapter: Adapter) -> None:
        """Tokens that have this slot have this adapter, from now on."""


class Family(NamedTuple):
    parse: Callable[[dict[str, Any], dict[str, Any]], Spec]  # of config.json and generation_config.json
    model: type[Model]

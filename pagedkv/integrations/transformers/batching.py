"""Attention of one layer in continuous batching: over the pages of transformers' PagedAttentionCache, in place.

A step is one row of tokens of many requests. transformers writes new keys and values by one index of tokens and gathers
every key of the batch by another; in steps of decodes alone it has a block table instead. Here both become a block
table, which the first layer of a step makes and the others read: new keys are appended to the pages, and attention
reads them there, in prefill and decode alike. The tokens of a page are consecutive in the index, so every page_size-th
entry names a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface
from transformers.generation.continuous_batching import cache as cache_module
from transformers.generation.continuous_batching import continuous_api, initialization, input_outputs

from pagedkv import ops
from pagedkv.integrations.transformers.attention import check

# The name while a batch runs. It has no mask function: transformers makes no mask and reads no positions on the host.
NAME = "pagedkv_continuous"


@dataclass(frozen=True, slots=True)
class Group:
    """The layers that share a block table, and the pages of one of them."""

    index: int
    window: int  # keys that a query sees, itself included; 0: all
    is_first_layer: bool
    slots_per_block: int  # from a block to the next one, in the numbers of read_index and write_index
    entries_per_block: int  # and in those of block_table
    pages: tuple[torch.Tensor, torch.Tensor] | None  # [num_blocks, page_size, kv_heads, head_dim]; None with a window


@dataclass(slots=True)
class Step:
    """What the layers of a group read in one step."""

    block_tables: torch.Tensor
    context_lens: torch.Tensor
    past_lens: torch.Tensor
    key_starts: torch.Tensor | None
    plans: dict[Any, torch.Tensor] = field(default_factory=dict)  # by the strides of queries, keys and values


_steps: WeakKeyDictionary[Any, dict[int, Step]] = WeakKeyDictionary()


# --- where releases differ


def _group_of(cache: Any, layer: int) -> Group:
    if hasattr(cache, "layer_to_allocator"):  # 5.23: one tensor; a block has pages for keys, then values, of each layer
        allocator, pages = cache.layer_to_allocator[layer], None
        slots = allocator.block_physical_stride
        entries = slots // allocator.tokens_per_page
        if allocator.supports_block_table:
            k_pages, v_pages = allocator.get_cache_for_block_table(layer)
            pages = k_pages[::entries], v_pages[::entries]
        is_first = layer == allocator.layer_indices[0]
        window = getattr(allocator, "sliding_window", 0)
        return Group(allocator.index, window, is_first, slots, entries, pages)
    index, place = cache.layer_index_to_group_indices[layer]  # 5.17: two tensors for each layer of a group
    if cache.sliding_windows[layer] > 1:
        return Group(index, cache.sliding_windows[layer], place == 0, cache.block_size, 1, None)
    shape = -1, cache.block_size, cache.num_key_value_heads, cache.head_dim
    pages = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    return Group(index, 0, place == 0, cache.block_size, 1, pages)


def _of_type(per_type: Any, group: Group) -> Any:
    """5.17 has no dictionary where all layers are of one type."""
    layer_type = "sliding_attention" if group.window else "full_attention"
    return per_type[layer_type] if isinstance(per_type, dict) else per_type


def _update_ring(cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> Any:
    """The cache's own update: copies of the keys and values that the queries may see, [num_keys, kv_heads, head_dim],
    those of each request one after the other; then the new ones are written."""
    if hasattr(cache, "layer_to_allocator"):
        options = options | {"cache": cache}  # 5.24: this call is attention's own, see install()
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=options)
        return key[0].transpose(0, 1), value[0].transpose(0, 1)
    index = {name: options[name] for name in ("read_index", "write_index")}
    return cache.update(key_states=key, value_states=value, layer_idx=layer, **index)


# --- a step


def _make_step(group: Group, cu_q: torch.Tensor, cu_k: torch.Tensor, options: dict[str, Any]) -> Step:
    context_lens = cu_k.diff()
    past_lens = context_lens - cu_q.diff()
    if group.pages is None:  # all keys lie in one page
        return Step(torch.zeros_like(context_lens)[:, None], context_lens, past_lens, cu_k[:-1])
    if options.get("block_table") is not None:
        tables = options["block_table"][group.index] // group.entries_per_block
        return Step(tables, context_lens, past_lens, None)
    index = options["read_index"][group.index]
    if not index.numel():  # no request has a past: what is written is all there is
        index = options["write_index"][group.index]
    page_size = group.pages[0].shape[1]
    longest = _of_type(options["max_length_k"], group)
    places = cu_k[:-1, None] + torch.arange(0, longest, page_size, dtype=torch.int32, device=cu_k.device)
    # Entries after the last key of a request name pages of others, which are never read.
    tables = index[places.clamp_(max=index.numel() - 1)] // group.slots_per_block
    return Step(tables.int(), context_lens, past_lens, None)


def _plan_of(step: Step, q: torch.Tensor, *batch: torch.Tensor, **options: Any) -> torch.Tensor:
    """The plan of the step, made once for all layers whose tensors have the same strides."""
    layout = q.stride(), batch[0].stride(), batch[1].stride()
    if layout not in step.plans:
        step.plans[layout] = ops.plan_attention(q, *batch, **options)
    return step.plans[layout]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as continuous batching calls it (5.17 to 5.24).

    query: [1, q_heads, num_tokens, head_dim]; key, value: [1, kv_heads, num_tokens, head_dim], the new ones, which are
    written to the cache, which knows the layer's window. cu_seq_lens_q, cu_seq_lens_k: [num_requests + 1] int32, the
    second for each type of layers.

    Returns out [1, num_tokens, q_heads, head_dim], and None in place of the attention weights. Rows that no request
    owns are not written.
    """
    check(query, key, value, dropout, options)
    for new, old in ("max_length_q", "max_seqlen_q"), ("max_length_k", "max_seqlen_k"):  # 5.23, 5.17
        options.setdefault(new, options.pop(old, None))
    layer = module.layer_idx
    group = _group_of(cache, layer)
    cu_k = _of_type(cu_seq_lens_k, group)
    steps = _steps.setdefault(cache, {})
    if group.is_first_layer:  # in every run: the capture of a CUDA graph follows one of the same arguments
        steps[group.index] = _make_step(group, cu_seq_lens_q, cu_k, options)
    step = steps[group.index]
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    lens = dict(cu_seqlens_q=cu_seq_lens_q, max_seqlen_q=options["max_length_q"], key_starts=step.key_starts)
    if group.pages is None:
        k, v = _update_ring(cache, layer, key, value, options | {"cu_seq_lens_k": cu_seq_lens_k})
        k_pages, v_pages = k[None], v[None]
        lens["window_size"] = group.window - 1, 0
    else:
        k_pages, v_pages = group.pages
        ops.append_kvcache(k, v, k_pages, v_pages, step.block_tables, step.past_lens, cu_seqlens=cu_seq_lens_q)
    batch = k_pages, v_pages, step.block_tables, step.context_lens
    out = ops.paged_attention_fwd(
        q, *batch, **lens, softmax_scale=scaling, softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(), plan=_plan_of(step, q, *batch, **lens),
    )  # fmt: skip
    return out[None], None


# --- the way into continuous batching


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        release = transformers.__version__
        raise NotImplementedError(
            f"transformers {release} has no {owner.__name__}.{name}: pagedkv was written for 5.17, 5.23 and 5.24"
        )
    if not hasattr(original, "is_pagedkv"):
        replacement = make(original)
        replacement.is_pagedkv = True
        setattr(owner, name, replacement)


def install(name: str) -> None:
    """Lets models whose attn_implementation is `name` run in continuous batching.

    transformers accepts a fixed list of names there, and takes any name with "flash" in it for one of its own. And from
    5.24 on models update the cache before they call attention. So some of its functions are replaced; for all other
    names they do what they did before, but continuous batching waits for the GPU once, when it starts.
    """

    def switch(original: Any) -> Any:
        def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **options: Any) -> None:
            if model.config._attn_implementation in (name, NAME):  # NAME stays where an earlier batch failed to start
                model.set_attn_implementation(NAME)
                self._original_attn_impl = name  # stop() gives it back
            else:
                original(self, model, *args, **options)

        return switch_to_cb_friendly_attn

    def needs_no_mask(original: Any) -> Any:
        def is_flash_attention_requested(config: Any = None, *args: Any, **options: Any) -> bool:
            is_ours = config is not None and config._attn_implementation == NAME
            return is_ours or bool(original(config, *args, **options))

        return is_flash_attention_requested

    def takes_block_tables(original: Any) -> Any:
        def ensure_decode_fast_path_is_available(config: Any, *args: Any, **options: Any) -> None:
            if config._attn_implementation != NAME:
                original(config, *args, **options)

        return ensure_decode_fast_path_is_available

    def leaves_update_to_attention(original: Any) -> Any:
        def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
            if self.config._attn_implementation != NAME or "cache" in kwargs:
                return original(self, key_states, value_states, layer_idx, kwargs=kwargs)
            kwargs["cache"] = self  # attention is called with what is in there
            return key_states, value_states

        return torch.compiler.disable(update)

    def waits_for_zeros(original: Any) -> Any:
        # A batch's inputs are set to zero on this thread's stream, then copied to the GPU on another one that does not
        # wait. On a busy GPU the zeros came last, and the first batch had no tokens (5.17, with any attention).
        def _reset_static_tensors(self: Any, full_reset: bool = False) -> None:
            original(self, full_reset)
            if full_reset and self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

        return _reset_static_tensors

    _replace(continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", switch)
    _replace(input_outputs.ContinuousBatchingIOs, "_reset_static_tensors", waits_for_zeros)
    _replace(initialization, "is_flash_attention_requested", needs_no_mask)
    _replace(cache_module, "is_flash_attention_requested", needs_no_mask)
    _replace(initialization, "ensure_decode_fast_path_is_available", takes_block_tables)
    if Version(transformers.__version__) >= Version("5.24"):
        _replace(cache_module.PagedAttentionCache, "update", leaves_update_to_attention)
    AttentionInterface.register(NAME, torch.compiler.disable(attend))  # pages are views of one tensor

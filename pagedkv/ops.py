"""Every operation and function of pagedkv: those that `pagedkv` itself shows, and the others that an engine needs.

    from pagedkv import ops

    normed = ops.rms_norm(x, weight)

Types are here, too: `Communicator`, this process as a rank of a group, and `GroupError`, by which a group ends;
`ElasticBuffer`, memory that grows and shrinks in place; `Step`, the result of `BlockManager.prepare`; `SuffixIndex`,
what followed the last tokens of a text before.
`help(ops.<name>)` gives shapes, dtypes, units and errors.
"""

from pagedkv._C import (
    Communicator,
    ElasticBuffer,
    GroupError,
    Step,
    SuffixIndex,
    all_gather,
    all_reduce,
    append_kvcache,
    asarray,
    bias_logits,
    build_info,
    check_errors,
    copy_blocks,
    count_tokens,
    decode_step,
    decode_step_words,
    embedding,
    empty,
    expert_linear,
    from_dlpack,
    gather_rows,
    get_num_threads,
    kernel_instances,
    linear,
    linear_algorithms,
    linear_candidates,
    linear_squares,
    lora_add,
    mask_logits,
    memory_info,
    merge_attention_states,
    moe_mlp,
    num_multiprocessors,
    open_ipc,
    paged_attention_fwd,
    plan_attention,
    qk_norm_rope_store,
    qkv_attention_fwd,
    reload_context,
    rms_norm,
    rope_append_kvcache,
    route_experts,
    sample,
    sample_candidates,
    sample_linear,
    scale_columns,
    set_num_threads,
    silu_and_mul,
    store_kvcache,
    swap_blocks,
    synchronize,
    take_sampled,
    token_logprobs,
    use_linear_algorithm,
)

TYPE_CHECKING = False  # type checkers take it for typing's
if TYPE_CHECKING:
    from pagedkv.tuning import tune_linear

__all__ = [
    "Communicator",
    "ElasticBuffer",
    "GroupError",
    "Step",
    "SuffixIndex",
    "all_gather",
    "all_reduce",
    "append_kvcache",
    "asarray",
    "bias_logits",
    "build_info",
    "check_errors",
    "copy_blocks",
    "count_tokens",
    "decode_step",
    "decode_step_words",
    "embedding",
    "empty",
    "expert_linear",
    "from_dlpack",
    "gather_rows",
    "get_num_threads",
    "kernel_instances",
    "linear",
    "linear_algorithms",
    "linear_candidates",
    "linear_squares",
    "lora_add",
    "mask_logits",
    "memory_info",
    "merge_attention_states",
    "moe_mlp",
    "num_multiprocessors",
    "open_ipc",
    "paged_attention_fwd",
    "plan_attention",
    "qk_norm_rope_store",
    "qkv_attention_fwd",
    "reload_context",
    "rms_norm",
    "rope_append_kvcache",
    "route_experts",
    "sample",
    "sample_candidates",
    "sample_linear",
    "scale_columns",
    "set_num_threads",
    "silu_and_mul",
    "store_kvcache",
    "swap_blocks",
    "synchronize",
    "take_sampled",
    "token_logprobs",
    "tune_linear",
    "use_linear_algorithm",
]

if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name != "tune_linear":  # the one that needs NumPy
            raise AttributeError(f"module 'pagedkv.ops' has no attribute {name!r}")
        from pagedkv.tuning import tune_linear

        globals()[name] = tune_linear
        return tune_linear


def __dir__() -> list[str]:
    return sorted(__all__)

"""What the readers of quantised checkpoints share: keys of quantization_config, and lists of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..config_keys import check_keys
from ..share import blocks

WHERE = "quantization_config."

# Of GPTQ and AWQ: how weights were made, by AutoRound, too, and what a library runs them with. What these say of the
# format is in the tensors: desc_act in g_idx, sym in the zeros.
HARMLESS = """
    act_data_type act_dynamic act_group_aware act_group_size act_sym amp autoround_version backend batch_size
    block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset desc_act disable_exllama
    do_fuse enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input exllama_config fuse_max_seq_len
    gradient_accumulate_steps hyb_act iters low_gpu_mem_usage lr max_input_length meta minmax_lr
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_to_fuse mse
    nsamples offload_to_disk offload_to_disk_path pack_impl pad_token_id provider quant_block_list quantizer
    scale_dtype seqlen static_attention_granularity static_groups static_kv_granularity supported_types sym
    to_quant_block_names tokenizer true_sequential uri use_cuda_fp16 use_exllama
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "act_bits": (16,),
    "adapter": ({},),
    "data_type": ("int",),
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "rotation": (),
}


def checked(
    raw: Mapping[str, Any],
    read: str,
    neutral: Mapping[str, tuple[Any, ...]],
    harmless: str = "",
    *,
    where: str = WHERE,
) -> None:
    """Raises for a key that is not known, or has another value than the neutral ones (null is one)."""
    check_keys(raw, read.split(), neutral, harmless.split(), where=where)


def one_of(
    raw: Mapping[str, Any], key: str, allowed: Collection[Any], default: Any = None, *, where: str = WHERE
) -> Any:
    """The value of a key that must have one of these."""
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, (list, dict)) or not any(value == each and type(value) is type(each) for each in allowed):
        names = " or ".join(repr(each) for each in allowed)
        raise NotImplementedError(f"{where}{key} is {value!r}; only {names} is supported")
    return value


def group_size(raw: Mapping[str, Any], *, where: str = WHERE) -> int:
    """How many neighbours in a row share a scale; -1: all."""
    value = raw.get("group_size")
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and (value < 8 or value % 8)):
        raise NotImplementedError(f"{where}group_size is {value!r} but must be a multiple of 8, or -1")
    return value


def names(raw: Mapping[str, Any], key: str, *, where: str = WHERE) -> tuple[str, ...]:
    value = raw.get(key) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{where}{key} is {value!r} but must be a list of names")
    return tuple(value)


def check_patterns(entries: Iterable[str], prefix: str, where: str) -> None:
    """Raises for a regular expression, which stands behind the prefix, that is none."""
    for each in entries:
        try:
            re.compile(each.removeprefix(prefix))
        except re.error as error:
            raise ValueError(f"{where} holds {each!r}, which is no pattern: {error}") from None


def names_part_of(name: str, entries: Collection[str]) -> bool:
    """Whether one of the entries is the name, or neighbouring components of it: a block, or the last of its names.
    "mlp.gate" names no part of "mlp.gate_proj"."""
    return any(f".{entry.strip('.')}." in f".{name}." for entry in entries)


def is_router(name: str) -> bool:
    """Of experts: "mlp.gate", but not "mlp.gate_proj"."""
    return name.endswith(".gate")


def num_groups(name: str, in_features: int, size: int, num_rows: int) -> int:
    """Of the inputs of a product, with int4 weights that a file packs in words of eight."""
    if in_features % 8 or num_rows % 8:
        raise NotImplementedError(f"{name}: [{num_rows}, {in_features}] of int4: only multiples of 8 are supported")
    if size == -1:
        return 1
    if in_features % size:
        raise NotImplementedError(f"{name}: {in_features} inputs are no multiple of {WHERE}group_size {size}")
    return blocks(in_features, size)

"""Which keys a model's config.json may hold.

A key is read, or has one value with which it changes nothing, or never changes what the model computes from token ids.
Any other key is refused by name, because a model with a setting ignored would write wrong text. What a training or a
tool leaves behind as a record is in HARMLESS; so is all that transformers itself ignores once the weights are loaded.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

HARMLESS = """
    base_model base_model_name_or_path finetuning_task id2label is_llama_config is_matryoshka label2id language license
    matryoshka_dimensions model_name name_or_path num_labels prefix problem_type sentence_transformers
    task_names task_specific_params tokenizer_class transformers.js_config transformers_version

    bos_token_id cls_token_id decoder_start_token_id mask_token_id pad_token_id sep_token_id unk_token_id

    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout embd_pdrop
    gradient_checkpointing hidden_dropout hidden_dropout_prob initializer_range output_attentions
    output_hidden_states output_scores resid_pdrop return_dict return_dict_in_generate tf_legacy_loss
    tie_last_hidden_states torchscript use_bfloat16 use_cache

    attn_implementation cache_implementation chunk_size_feed_forward cross_attention_hidden_size is_decoder
    max_seq_len max_seq_length max_sequence_length model_max_length pretraining_tp remove_invalid_values seq_length
    use_flash_attention use_flash_attention_2 use_flash_attn

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length min_p no_repeat_ngram_size num_beam_groups num_beams num_return_sequences repetition_penalty
    suppress_tokens temperature top_k top_p typical_p
"""
HARMLESS_PREFIXES = ("_", "unsloth_")  # transformers' own records of a load; the version of Unsloth

# A key, and the values with which it asks for nothing. null is one of them, except for is_causal.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "is_causal": (True,),  # transformers attends in both directions for null, too
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}


def check_keys(
    raw: Mapping[str, Any],
    read: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    harmless: Collection[str] = (),
    harmless_prefixes: tuple[str, ...] = (),
    where: str = "",
) -> None:
    """Raises ValueError for a key in none of the tables, NotImplementedError for a value that is not neutral.

    Args:
        where: what messages call the object that holds the keys, with a dot behind it
    """
    for key, value in raw.items():
        if key in neutral:
            if value not in neutral[key] and (value is not None or key == "is_causal"):
                only = " or ".join(repr(each) for each in neutral[key] or (None,))
                raise NotImplementedError(f"{where}{key} is {reprlib.repr(value)}; only {only} is supported")
        elif value is not None and key not in read and key not in harmless and not key.startswith(harmless_prefixes):
            raise ValueError(
                f"{where}{key} is {reprlib.repr(value)}, a setting that is not known here and might change what the "
                "model computes; if it does not, remove it"
            )


def flag(raw: Mapping[str, Any], name: str, default: bool = False, where: str = "") -> bool:
    """Of a key that may be absent. A text is none: "false" would be true."""
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ValueError(f"{where}{name} is {value!r} but must be true or false")
    return value


def number(raw: Mapping[str, Any], name: str, default: float | None = None, where: str = "") -> float:
    """A positive one that a float holds. Without a default the key must be there."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise KeyError(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{where}{name} is {value!r} but must be a positive number")
    return float(value)

"""The sampling that a model's makers recommend: generation_config.json
(https://huggingface.co/docs/transformers/main_classes/text_generation)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .config_keys import flag
from .files import read_json

# Its name there, and here. vLLM takes the same ones.
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
DRAWN = ("temperature", "top_k", "top_p", "min_p")  # what is not asked where nothing is drawn
# Settings of the file that would change the tokens and that are not followed, and the values with which they do not.
IGNORED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({},),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([], ""),
}

logger = logging.getLogger(__name__)


def read_generation(folder: Path) -> dict[str, Any]:
    """What the file says, by the names of SamplingParams.

    - temperature, top_k, top_p, min_p and repetition_penalty as the file says;
    - max_tokens is its max_new_tokens, or None: an answer ends where the model ends it;
    - do_sample false is temperature 0, whatever else the file says of the drawing, as in transformers. Without
      do_sample the other settings hold, as in vLLM;
    - what is missing or null has SamplingParams' default.

    Settings that are not followed are named in a warning.
    """
    path = folder / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    given = {name: raw[name] for name in NAMES if raw.get(name) is not None}
    if not flag(raw, "do_sample", True):
        given = {name: value for name, value in given.items() if name not in DRAWN} | {"temperature": 0}
    ignored = [name for name, neutral in IGNORED.items() if raw.get(name) is not None and raw[name] not in neutral]
    if given:
        logger.info("%s: requests without params have %s", path, _listed(given))
    if ignored:
        logger.warning("%s: not followed: %s", path, _listed({name: raw[name] for name in ignored}))
    return {"max_tokens": None} | {NAMES[name]: value for name, value in given.items()}


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())

"""How the folder of an embedding model makes a vector of a text: the files of sentence-transformers.

modules.json lists what follows the model (https://sbert.net/docs/sentence_transformer/usage/custom_models.html). The
last token's hidden state, normalised or not, is what is computed here; whatever else a folder asks for is refused by
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .files import load_json, read_json

SENTENCE_TRANSFORMERS = "sentence_transformers."  # where its own modules come from; others are a folder's own code
MODULES = ("Transformer", "Pooling", "Normalize")
ALONE = [{"path": "", "type": "sentence_transformers.Transformer"}, {"type": "sentence_transformers.Normalize"}]


def read_normalizes(folder: Path) -> bool:
    """Whether the vector is normalised to length 1, as it is without modules.json. Raises NotImplementedError for any
    pooling but that of the last token."""
    path = folder / "modules.json"
    modules = load_json(path) if path.is_file() else ALONE
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ValueError(f"{path}: a JSON list of objects was expected")
    kinds = [_check_module(path, each) for each in modules]
    pooling = [each.get("path", "") for each, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    for name in pooling or ["1_Pooling"]:
        config = folder / str(name) / "config.json"
        if pooling or config.is_file():
            _check_pooling(config)
    return "Normalize" in kinds


def _check_module(path: Path, module: dict[str, Any]) -> str:
    """Its kind."""
    given = str(module.get("type"))
    kind = given.rpartition(".")[2]
    if kind not in MODULES or not given.startswith(SENTENCE_TRANSFORMERS):
        raise NotImplementedError(f"{path}: a module is {given!r}; supported are those of {', '.join(MODULES)}")
    if kind == "Transformer":
        if module.get("path"):
            raise NotImplementedError(f"{path}: the model is in {module['path']!r}; supported is the folder itself")
        settings = path.with_name("sentence_bert_config.json")
        if read_json(settings, missing={}).get("do_lower_case"):
            raise NotImplementedError(f"{settings}: do_lower_case is true; only false is supported")
    return kind


def _check_pooling(path: Path) -> None:
    raw = read_json(path)
    named = raw.get("pooling_mode")  # since 2026; before, a flag for each
    flags = [key.removeprefix("pooling_mode_") for key in raw if key.startswith("pooling_mode_") and raw[key]]
    modes = [named] if isinstance(named, str) else named or flags or ["mean"]  # sentence-transformers' default
    if modes != ["lasttoken"]:
        raise NotImplementedError(f"{path}: the pooling is {' + '.join(map(str, modes))}; only lasttoken is supported")

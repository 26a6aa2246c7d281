"""The families of models that an engine serves: what reads their config.json, and what computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import config
from .files import read_json
from .qwen3 import Qwen3
from .spec import Model, Spec

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


class Family(NamedTuple):
    parse: Callable[[dict[str, Any], dict[str, Any]], Spec]  # of config.json and generation_config.json
    load: Callable[[Any, Any, int], Model]  # of its Spec, a checkpoint and the largest number of positions


FAMILIES = {"qwen3": Family(config.parse, Qwen3)}  # by the model_type of config.json


def read_spec(folder: Path) -> Spec:
    """Of config.json, and the EOS ids of generation_config.json where there is one."""
    path = folder / "config.json"
    for name in ADAPTERS:
        if (folder / name).exists():
            raise NotImplementedError(
                f"{folder / name}: adapters (LoRA) are not supported: merge it into the weights and remove the file"
            )
    if not path.exists():
        raise FileNotFoundError(f"{folder}: no config.json: not the folder of a model")
    raw, generation = read_json(path), read_json(folder / "generation_config.json", missing={})
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise NotImplementedError(f"{path}: model_type is {kind!r}; only {', '.join(FAMILIES)} (dense) is supported")
    try:
        return FAMILIES[kind].parse(raw, generation)
    except KeyError as error:
        raise ValueError(f"{path}: no {error.args[0]!r}") from None
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from None
    except (AttributeError, TypeError, ValueError) as error:  # an entry of another type than the code above reads
        raise ValueError(f"{path}: {error}") from None


def load_model(spec: Spec, checkpoint: Any, max_model_len: int) -> Model:
    """With the checkpoint's tensors, for positions below max_model_len."""
    return FAMILIES[spec.family].load(spec, checkpoint, max_model_len)

"""Readers of quantised checkpoints, a file for each quant_method of quantization_config. All make the same weights of
them: see weight.Weight."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from ..spec import Quantization

METHODS = {"awq": ".awq", "compressed-tensors": ".compressed_tensors", "fp8": ".fp8", "gptq": ".gptq"}


def parse_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Of config.json. Raises for what cannot be computed, or is not known."""
    given = raw.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"quantization_config is {given!r} but must be an object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        supported = ", ".join(METHODS)
        raise NotImplementedError(f"quantization_config.quant_method is {method!r}; supported are {supported}")
    return cast(Quantization, import_module(METHODS[method], __package__).parse(given))


def asked_for(wanted: str | None, found: Quantization | None) -> Quantization | None:
    """wanted: None: as it was found; "fp8": 16-bit weights become float8 while they are loaded."""
    if wanted is None or (found is not None and found.stores == (wanted,)):
        return found
    if found is not None:
        raise ValueError(f"quantization is {wanted!r} but the checkpoint's weights are {found.name}: leave it None")
    from .fp8 import LoadedAsFp8

    return LoadedAsFp8()

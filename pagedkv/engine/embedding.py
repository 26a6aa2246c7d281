"""Embeddings: what a request for one asks of the engine, and what becomes of the vector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .outputs import EmbeddingOutput
from .sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=1, temperature=0, detokenize=False)


def with_length_1(output: EmbeddingOutput) -> EmbeddingOutput:
    if output.error is not None:
        return output
    return replace(output, embedding=output.embedding / np.linalg.norm(output.embedding))

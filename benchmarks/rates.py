"""Tokens a second of an engine with random weights, of one run each, with nothing cached."""

from __future__ import annotations

import random
import time

from pagedkv import LLM, SamplingParams
from pagedkv.cli import nano_bench

LONG_PROMPT = 30_000


class Rates:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.rng = llm, random.Random(0)
        self.workload = nano_bench.make_workload()

    def timed(self, num_prompts: int, prompt: int, new: int) -> float:
        """Seconds."""
        prompts = [[self.rng.randint(0, 10000) for _ in range(prompt)] for _ in range(num_prompts)]
        self.llm.manager.reset_prefix_cache()
        start = time.perf_counter()
        outputs = self.llm.generate(
            prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new), use_tqdm=False
        )
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.error:
                raise output.error
            assert len(output.token_ids) == new
        return seconds

    def one(self) -> float:
        """Of a request alone: 128 tokens in, 512 out."""
        return 512 / self.timed(1, 128, 512)

    def nano(self) -> float:
        """Of 256 requests at once (pagedkv/cli/nano_bench.py)."""
        return self.workload.num_new_tokens / nano_bench.run(self.llm, self.workload)[1]

    def prefill(self) -> float:
        """Of 16 prompts of 4,096 tokens at once, with a token out each."""
        return 16 * 4096 / self.timed(16, 4096, 1)

    def first(self) -> float:
        """Of a prompt of 30,000 tokens, until its first token is there."""
        return LONG_PROMPT / self.timed(1, LONG_PROMPT, 1)

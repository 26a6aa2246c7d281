"""The engine beside processes that eat the CPU: its tokens must not depend on who is ready first. How much slower it is
is measured by benchmarks/busy_neighbour.py."""

import sys
from pathlib import Path

from pagedkv import LLM

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import busy_neighbour


def test_the_same_tokens_beside_busy_processes(seed, device):
    """Under preemption, too: of half the pages that the requests would use."""
    prompts, params = busy_neighbour.requests(80, seed)
    for options in ({"num_blocks": 400}, {"num_blocks": 60, "swap_space": 30_000}):
        with LLM(busy_neighbour.DEMO, device=device, block_size=4, max_num_seqs=24, **options) as llm:
            expected, alone = busy_neighbour.run(llm, prompts, params)
            with busy_neighbour.neighbours(4):
                tokens, beside = busy_neighbour.run(llm, prompts, params)
            assert (llm.scheduler.queues.num_preemptions > 0) == ("swap_space" in options)
        print(f"{alone:.2f} s alone, {beside:.2f} s beside 4 busy processes")
        assert tokens == expected

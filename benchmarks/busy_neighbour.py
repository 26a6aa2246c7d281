"""The engine beside processes that eat the CPU: the same tokens, and how much longer they take.

    python benchmarks/busy_neighbour.py [--device cpu] [--neighbours 0 1 2 4 8]

Sums through the model in the package, greedy and sampled in turn. A neighbour is a process that counts for ever. Each
row is the median of `--repeats` runs; "alone" is measured again after the last, to show what else the machine did.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from record import make_parser, record_run

import pagedkv
from pagedkv import LLM, SamplingParams

DEMO = Path(pagedkv.__file__).parent / "data" / "demo_model"
# It ends with its parent, however that ends.
COUNTING = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: sum(range(100_000))"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that use a core each for as long as this lasts."""
    processes: list[subprocess.Popen] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", COUNTING], stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None and process.stdout.readline(), "a neighbour did not start"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def requests(count: int, seed: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [f"{rng.randrange(1000)}+{rng.randrange(1000)}=" for _ in range(count)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=16, ignore_eos=True) for i in range(count)]
    return prompts, params


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> tuple[list[list[int]], float]:
    """Tokens and seconds, with nothing in the prefix cache."""
    llm.manager.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.token_ids for output in outputs], time.perf_counter() - start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    prompts, params = requests(args.num_requests, seed=0)
    rows: list[dict] = []
    with LLM(DEMO, device=args.device, max_num_seqs=64, max_num_batched_tokens=2048) as llm:
        expected, _ = run(llm, prompts, params)  # warms up
        for count in [*args.neighbours, 0]:
            with neighbours(count):
                results = [run(llm, prompts, params) for _ in range(args.repeats)]
            seconds = statistics.median(seconds for _, seconds in results)
            is_same = all(tokens == expected for tokens, _ in results)
            row = {"neighbours": count, "seconds": round(seconds, 4), "same_tokens": is_same}
            row["slowdown"] = round(seconds / (rows[0]["seconds"] if rows else seconds), 2)
            rows.append(row)
            print(
                f"{count:>3} neighbours  {seconds:7.3f} s  {row['slowdown']:5.2f} x  same tokens: {is_same}", flush=True
            )
    if not all(row["same_tokens"] for row in rows):
        raise SystemExit("a neighbour changed the tokens")
    record_run(args, "busy_neighbour", rows, args.device, device=args.device)


if __name__ == "__main__":
    main()

"""Many requests from many threads, of which some are aborted: pages and memory stay where they are.

    python benchmarks/soak.py [--requests 100000] [--threads 32] [--abort 0.2]

The model in the package on the CPU, which adds: every answer that is not aborted must be right, in a pool that holds a
fraction of what is asked for. Threads use LLM.generate, LLM.stream (and leave some), and Engine.add_request with abort.
Prints and records the resident memory, the pages in use and Python's objects after each tenth.
Writes results/soak.json.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

from record import make_parser, record

import pagedkv
from pagedkv import LLM, SamplingParams

FOLDER = Path(pagedkv.__file__).parent / "data" / "demo_model"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    def __init__(self, llm: LLM, abort_share: float) -> None:
        self.llm, self.abort_share = llm, abort_share
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def serve(self, number: int, count: int) -> None:
        """One thread."""
        rng, llm, counts = random.Random(number), self.llm, Counter()
        try:
            while counts["requests"] < count:
                ways = [self.batch, self.stream, self.batch_with_salt]
                rng.choice(ways)(llm, rng, counts)
        except BaseException as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        self.counts.update(counts)

    def batch(self, llm: LLM, rng: random.Random, counts: Counter, salt: bytes = b"") -> None:
        sums = [(rng.randrange(100), rng.randrange(100)) for _ in range(rng.choice([1, 1, 3, 10]))]
        outputs = llm.generate([f"{a}+{b}=" for a, b in sums], GREEDY, salt=salt, use_tqdm=False)
        for (a, b), output in zip(sums, outputs, strict=True):
            counts["requests"] += 1
            counts["right"] += output.text == str(a + b)

    def batch_with_salt(self, llm: LLM, rng: random.Random, counts: Counter) -> None:
        self.batch(llm, rng, counts, salt=b"%d" % rng.randrange(4))

    def stream(self, llm: LLM, rng: random.Random, counts: Counter) -> None:
        a, b = rng.randrange(100), rng.randrange(100)
        counts["requests"] += 1
        text, stream = "", llm.stream(f"{a}+{b}=", GREEDY)
        for output in stream:
            text += output.text
            if rng.random() < 3 * self.abort_share:  # a third of all are streamed
                stream.close()
                counts["aborted"] += 1
                return
        counts["right"] += text == str(a + b)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--abort", type=float, default=0.2)
    args = parser.parse_args()
    rows = []
    with LLM(FOLDER, device="cpu", block_size=4, num_blocks=120, max_num_seqs=32, seed=0) as llm:
        soak = Soak(llm, args.abort)
        for part in range(10):
            start = time.perf_counter()
            count = args.requests // 10 // args.threads + 1
            threads = [
                threading.Thread(target=soak.serve, args=(part * args.threads + i, count)) for i in range(args.threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while llm.has_unfinished_requests():
                llm.step()
            llm.manager.check()
            gc.collect()
            pool, counts = llm.manager.stats(), soak.counts
            rows.append({"requests": counts["requests"], "right": counts["right"], "aborted": counts["aborted"],
                         "seconds": time.perf_counter() - start, "resident_bytes": resident_bytes(),
                         "objects": len(gc.get_objects()), "pages_used": pool["used"], "sequences": len(llm.manager),
                         "preemptions": llm.scheduler.queues.num_preemptions})  # fmt: skip
            print(rows[-1], flush=True)
            assert not soak.problems, soak.problems[0]
            assert counts["right"] + counts["aborted"] == counts["requests"] and pool["used"] == len(llm.manager) == 0
    if not args.no_record:
        record("soak", rows, threads=args.threads)


if __name__ == "__main__":
    main()

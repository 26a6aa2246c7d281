"""Speculative decoding beside none: tokens/s of the same engine, by batch size.

    python benchmarks/speculation.py [--models 0.6B 8B] [--device cuda] [--batches 1 4 16 64 256] [--parts replay edit draft]

Weights are random, and such a model says nothing that repeats itself. So answers are scripted: what a step samples is
replaced by the script's token once the host has it. Devices and drafters do all that they do with a real answer, and a
guess is right where it is what the script says.

replay   a drafter that costs nothing and knows the script: each guess is right with a probability of 0, 0.5, 0.7, 0.9
edit     the suffix drafter: the prompt is a source file of pagedkv, the answer the same file with a name changed
prose    the suffix drafter where nothing repeats itself
draft    a draft model of 0.6B, whose guesses are replaced by the script's with a probability of 0.7

Writes results/speculation-<device>-<model>.json.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from pathlib import Path
from statistics import mean

from record import make_parser, record_run

import pagedkv
from pagedkv import LLM, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.engine.scheduling.step import Step
from pagedkv.engine.speculation.speculation import Speculation

PARTS = ("replay", "edit", "prose", "draft")
KNOWLEDGE = (0.0, 0.5, 0.7, 0.9)
PROMPT, SOURCE = 128, "engine/scheduling/queues.py"
FIRST_ID = 1000  # of the words of a source file


class Script:
    """What sequences say, by their first token. While it is entered, steps sample that."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers

    def next(self, seq, offset: int = 0) -> list[int]:
        return self.answers[seq.prompt[0]][len(seq.new_tokens) + offset :]

    def __enter__(self) -> Script:
        self._tokens, script = Step.tokens, self

        def tokens(step: Step) -> list[int]:
            self._tokens(step)
            rows: dict[int, int] = {}  # of the sequences so far
            scripted = []
            for seq in step.receivers:
                rows[seq.id] = rows.get(seq.id, -1) + 1
                scripted.append((script.next(seq, rows[seq.id]) or [0])[0])
            return scripted

        Step.tokens = tokens
        return self

    def __exit__(self, *exc: object) -> None:
        Step.tokens = self._tokens


class Replay:
    """Guesses the script's next token with a probability, and another else. model: a drafter that works for its guesses."""

    def __init__(self, script: Script, knowledge: float, seed: int, model=None) -> None:
        self.script, self.knowledge, self.model, self.is_free = script, knowledge, model, model is None
        self.rng, self.is_measurable = random.Random(seed), True

    def guess(self, sequences, counts):
        if self.model is not None:
            self.model.guess(sequences, counts)
            self.is_measurable = self.model.is_measurable
        pairs = zip(sequences, counts, strict=True)
        guesses = [[self._token(token) for token in self.script.next(seq)[:count]] for seq, count in pairs]
        for seq, each in zip(sequences, guesses, strict=True):
            if self.model is not None and seq.id in self.model._own:
                self.model._own[seq.id].guesses = each  # whose KV it then has, as of guesses of its own
        return guesses

    def _token(self, token: int) -> int:
        return token if self.rng.random() < self.knowledge else token + 1

    def take(self, sequences) -> None: ...

    def forget(self) -> None: ...


def source_tokens() -> list[int]:
    text = (Path(pagedkv.__file__).parent / SOURCE).read_text()
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    ids = {word: FIRST_ID + i for i, word in enumerate(dict.fromkeys(words))}
    return [ids[word] for word in words]


def random_script(batch: int, length: int, seed: int) -> tuple[list[list[int]], Script]:
    rng = random.Random(1000 * batch + seed)  # what another batch was about must not be in its answers
    prompts = [[i, *(rng.randrange(FIRST_ID, 100_000) for _ in range(PROMPT - 1))] for i in range(batch)]
    return prompts, Script({i: [rng.randrange(FIRST_ID, 100_000) for _ in range(length)] for i in range(batch)})


def edit_script(batch: int, length: int, seed: int) -> tuple[list[list[int]], Script]:
    """Each sequence has the file from another word on, and answers with it, where one word is another."""
    words, rng = source_tokens(), random.Random(seed)
    prompts, answers = [], {}
    for i in range(batch):
        start = rng.randrange(len(words) - length)
        part, new = words[start : start + length], 90_000 + 1000 * (seed % 10) + i
        old = max(set(part), key=lambda word: (part.count(word) * (part.count(word) < length / 20), word))
        prompts.append([i, *part])
        answers[i] = [new if word == old else word for word in part]
    return prompts, Script(answers)


class Bench:
    def __init__(self, llm: LLM, length: int) -> None:
        self.llm, self.length = llm, length
        self.guesser = llm._core._guesser
        self.drafter = self.guesser.drafter  # the engine's own

    def rate(self, prompts: list[list[int]], script: Script, guesser: Speculation | None) -> tuple[float, float, float]:
        """Tokens/s, the share of guesses that were right, and tokens a step of a sequence."""
        llm, counters = self.llm, self.llm.counters
        llm._core.call(lambda: setattr(llm._core._pipeline, "guesser", guesser))
        before = counters.copy()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=self.length, detokenize=False)
        start = time.perf_counter()
        with script:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for output in outputs:
            if output.error:
                raise output.error
        guessed = counters.num_draft_tokens - before.num_draft_tokens
        right = counters.num_accepted_tokens - before.num_accepted_tokens
        steps = counters.num_steps - before.num_steps
        return len(prompts) * self.length / seconds, right / max(guessed, 1), self.length / steps

    def row(self, name: str, make_script, batch: int, make_drafter, runs: int) -> dict:
        """Both ways in turn, so many times behind a first that warms up: means, because each run has its own luck."""
        rates = {False: [], True: []}
        guesser = Speculation(None, self.guesser._max_guesses, self.guesser.times.max_num_rows)
        for seed in range(1 + runs):
            for is_speculative in rates:
                prompts, script = make_script(batch, self.length, seed)
                guesser.drafter = make_drafter(script, seed)
                rates[is_speculative].append(self.rate(prompts, script, guesser if is_speculative else None))
        (without, _, _), (rate, right, tokens) = (map(mean, zip(*each[1:], strict=True)) for each in rates.values())
        row = {"part": name, "batch": batch, "without": without, "with": rate, "ratio": rate / without,
               "right": right, "tokens_per_step": tokens}  # fmt: skip
        print(f"{name:12} {batch:4} {without:9,.0f} {rate:9,.0f} {rate / without:6.2f} {right:6.2f} {tokens:6.2f}", flush=True)
        return row


def measure(bench: Bench, parts: list[str], batches: list[int], runs: int) -> list[dict]:
    rows = []
    print(f"{'':12} {'seqs':>4} {'without':>9} {'with':>9} {'ratio':>6} {'right':>6} {'tokens a step':>6}")
    ways = [(f"replay {p}", random_script, lambda script, seed, p=p: Replay(script, p, seed)) for p in KNOWLEDGE]
    ways += [("edit", edit_script, lambda script, seed: bench.drafter)]
    ways += [("prose", random_script, lambda script, seed: bench.drafter)]
    ways += [("draft 0.7", random_script, lambda script, seed: Replay(script, 0.7, seed, bench.drafter))]
    for batch in batches:
        for name, make_script, make_drafter in ways:
            if name.split()[0] in parts:
                rows.append(bench.row(name, make_script, batch, make_drafter, runs))
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B"], choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--length", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=3, help="of each row, behind one that warms up")
    parser.add_argument("--guesses", type=int, default=7, help="num_speculative_tokens")
    args = parser.parse_args()
    for model in args.models:
        rows = []
        for parts in ([part for part in args.parts if part != "draft"], [part for part in args.parts if part == "draft"]):
            if not parts:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                folder = nano_bench.write_shape(model, Path(scratch) / model)
                config = {"method": "suffix", "num_speculative_tokens": args.guesses}
                if parts == ["draft"]:
                    draft = nano_bench.write_shape("0.6B", Path(scratch) / "draft")
                    config |= {"method": "draft_model", "model": str(draft)}
                llm = LLM(folder, device=args.device, load_format="dummy", max_num_seqs=max(args.batches),
                          max_model_len=4096, enable_prefix_caching=False, speculative_config=config)  # fmt: skip
            with llm:
                print(f"{model}, {config['method']}, {args.length} tokens in an answer", flush=True)
                rows += measure(Bench(llm, args.length), parts, args.batches, args.runs)
        record_run(args, f"speculation-{args.device}-{model}", rows, args.device)


if __name__ == "__main__":
    main()

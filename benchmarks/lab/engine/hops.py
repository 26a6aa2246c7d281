"""Counts what a request passes on its way: Python calls of add_request(), and classes, files and calls up to its end.

    python benchmarks/lab/engine/hops.py

The model is the demo in the package, on the CPU, and the request is the second one: what is made at first use is there.
A class counts if Python code of it runs, on any thread; only code of pagedkv counts, and what dataclasses generate for
it. NOTES.md has the figures.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import pagedkv
from pagedkv import Engine, SamplingParams

PACKAGE = str(Path(pagedkv.__file__).parent)


class Calls:
    """Python calls within pagedkv while it is a context, by where they are defined."""

    def __init__(self) -> None:
        self.by_function: Counter[str] = Counter()
        self.classes: set[str] = set()
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code, owner = frame.f_code, frame.f_locals.get("self")
        kind = type(owner)
        is_ours = code.co_filename.startswith(PACKAGE)
        is_generated = code.co_filename == "<string>" and kind.__module__.startswith("pagedkv")
        if event != "call" or not (is_ours or is_generated):
            return
        if owner is not None and kind.__module__.startswith("pagedkv"):
            self.classes.add(kind.__name__)
        if is_ours:
            self.files.add(code.co_filename[len(PACKAGE) + 1 :])
        name = getattr(code, "co_qualname", code.co_name)
        self.by_function[f"{kind.__name__}.__init__" if is_generated else name] += 1

    def __enter__(self) -> Calls:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def run(engine: Engine, prompt: str) -> None:
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=4))
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    whole = Calls()
    threading.setprofile(lambda *event: whole(*event) if is_counted else None)  # the engine's thread begins now
    is_counted = False
    with Engine(Path(PACKAGE) / "data" / "demo_model", device="cpu") as engine:
        run(engine, "1+1=")
        with Calls() as added:
            engine.add_request("2+3=", SamplingParams(temperature=0, max_tokens=4))
        while engine.has_unfinished_requests():
            engine.step()
        is_counted = True
        with whole:
            run(engine, "3+4=")
        is_counted = False
    threading.setprofile(None)
    params = sum(count for name, count in added.by_function.items() if "SamplingParams" in name or "check_" in name)
    print(f"add_request: {added.by_function.total() - params} calls (and {params} of SamplingParams)")
    print(f"a request:   {len(whole.classes)} classes in {len(whole.files)} files, {whole.by_function.total()} calls")
    if "-v" in sys.argv:
        print(*(f"{count:5d} {name}" for name, count in added.by_function.most_common()), sep="\n")
        print(*sorted(whole.classes), sep=", ")
        print(*sorted(whole.files), sep=", ")


if __name__ == "__main__":
    main()

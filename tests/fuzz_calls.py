"""Random calls of everything: each raises a typed error and changes nothing, or its result equals the oracle's.

    python tests/fuzz_calls.py --calls 100000 --seed 7          # `make fuzz-calls`: under ASan and UBSan
    python tests/fuzz_calls.py --seed 7 --first 1234 --calls 1    # one call again, as a failure says
    python tests/fuzz_calls.py --op linear

A call is drawn from (seed, its number) alone, so it can be repeated alone. Half of them fit; the others are changed by
fuzz_calls_bad.py, and may be right all the same. A child process makes the calls, so that a crash has a number too.
"""

import argparse
import ast
import collections
import contextlib
import gc
import inspect
import io
import itertools
import mmap
import os
import struct
import sys
import time
import traceback
import warnings
from types import SimpleNamespace

import numpy as np
from fuzz_calls_attention import ATTENTION_OPERATIONS
from fuzz_calls_bad import MUTATIONS, pick, views_in
from fuzz_calls_collectives import COLLECTIVE_OPERATIONS
from fuzz_calls_dense import DENSE_OPERATIONS
from fuzz_calls_manager import try_manager
from fuzz_calls_memory import View, alive, torch
from fuzz_calls_objects import SESSIONS as OBJECT_SESSIONS
from fuzz_calls_objects import Wrong
from fuzz_calls_ops import CACHE_OPERATIONS, Draw
from fuzz_calls_qkv import APPEND_OPERATIONS, QKV_OPERATIONS
from fuzz_calls_sampling import SAMPLING_OPERATIONS

import pagedkv

OPERATIONS = CACHE_OPERATIONS | APPEND_OPERATIONS | ATTENTION_OPERATIONS | QKV_OPERATIONS
OPERATIONS |= DENSE_OPERATIONS | SAMPLING_OPERATIONS | COLLECTIVE_OPERATIONS
SESSIONS = OBJECT_SESSIONS | {"BlockManager": try_manager}
ERRORS = (TypeError, ValueError, BufferError, MemoryError, NotImplementedError)  # OutOfBlocks is a MemoryError


def function_of(name: str):
    return getattr(pagedkv.Tensor, name[7:]) if name.startswith("Tensor.") else getattr(pagedkv._C, name)


PARAMETERS = {name: inspect.signature(function_of(name)).parameters for name in OPERATIONS}


def given(value):
    if isinstance(value, View):
        return value.give(pagedkv)
    return (
        type(value)(given(v) for v in value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, View) for v in value)
        else value
    )


def call(name: str, arguments: dict, rng):
    """Some of the arguments by position, as far as they may be; a missing one puts the others at its place, too."""
    positions = [p for p, x in PARAMETERS[name].items() if x.kind != x.KEYWORD_ONLY]
    only = sum(x.kind == x.POSITIONAL_ONLY for x in PARAMETERS[name].values())
    count = max(int(rng.integers(0, len(positions) + 1)), only)
    leading = list(itertools.takewhile(lambda p: p in arguments, positions[:count]))
    positional = [given(arguments[p]) for p in leading]  # CPython 3.11 leaks the dict where a generator fails here
    keywords = {key: given(value) for key, value in arguments.items() if key not in leading}
    return function_of(name)(*positional, **keywords)


def is_vast(view: View) -> bool:
    return view.size == 0 and np.prod([max(n, 1) for n in view.shape], dtype=object) > 2**20


def framework_of(view: View, dtype: str):
    """The type of an allocated output: torch in, torch out; NumPy in, NumPy out where NumPy has the dtype."""
    if view.kind == "torch":
        return torch.Tensor
    in_numpy = view.kind in ("numpy", "memoryview", "array") and dtype not in ("bfloat16", "float8_e4m3fn")
    return np.ndarray if in_numpy else pagedkv.Tensor


def numbers_of(result) -> np.ndarray:
    if torch is not None and isinstance(result, torch.Tensor):
        return result.double().numpy() if result.is_floating_point() else result.numpy()
    return np.asarray(result.tolist()).reshape(result.shape)


def compare(name: str, got, outcome, is_changed: bool):
    """Where the oracle has NaN its own input was poisoned by a change; what fits never is. Then the poison of a key
    that one query of a sequence sees may reach the others, too."""
    if outcome.check is not None:
        outcome.check(got)
    if outcome.values is None:
        return
    expected = np.asarray(outcome.values)
    if got.shape != expected.shape:
        raise Wrong(f"{name} has the shape {got.shape}, the oracle's {expected.shape}")
    mask = np.broadcast_to(True if outcome.mask is None else outcome.mask, got.shape)
    if outcome.atol == 0 and outcome.rtol == 0:
        is_equal = (got == expected) | ((got != got) & (expected != expected))
    else:
        with np.errstate(invalid="ignore"):
            is_equal = (
                (np.abs(got - expected) <= outcome.atol + outcome.rtol * np.abs(expected))
                | (got == expected)
                | np.isnan(expected)
            )
            is_equal |= is_changed & np.isnan(got)
    if not is_equal[mask].all():
        at = tuple(int(i) for i in np.argwhere(mask & ~is_equal)[0])
        raise Wrong(f"{name}{list(at)} is {got[at]}, the oracle's {expected[at]}")


def judge_memory(views, allowed: dict):
    for view in views:
        changed = view.memory.bytes != view.memory.before
        if view.memory in allowed:
            changed &= np.logical_not(allowed[view.memory])
        if changed.any():
            raise Wrong(f"byte {changed.argmax()} of {view!r} was changed")


def judge(name: str, arguments: dict, views, result, *, is_changed=False, is_wild=False):
    """The result of a call that raised nothing. `is_wild`: numbers so odd that only the places written are judged."""
    operation = OPERATIONS[name]
    defaults = {p: x.default for p, x in PARAMETERS[name].items()}
    a = SimpleNamespace(
        **defaults | {p: x for p, x in arguments.items() if x is not None or type(defaults[p]) not in (int, float)}
    )
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        outcomes = operation.expect(a)
    allowed: dict = {}
    written = {key: value for key, value in arguments.items() if isinstance(value, View)}
    written |= {
        (key, i): v
        for key, value in arguments.items()
        if isinstance(value, (list, tuple))
        for i, v in enumerate(value)
        if isinstance(v, View)
    }
    written |= {(key, 0): value for key, value in arguments.items() if isinstance(value, View)}
    for key, outcome in outcomes.items():
        if key in written:
            view = written[key]
            mask = view.bytes_of(True if outcome.mask is None else outcome.mask)
            allowed[view.memory] = allowed.get(view.memory, False) | mask
    judge_memory(views, allowed)
    returned = operation.returns(a)
    results = [] if not returned else [result] if len(returned) == 1 else list(result)
    if len(results) != len(returned) or (not returned and result is not None):
        raise Wrong(f"returned {result!r}")
    for key, outcome in outcomes.items():
        if is_wild:
            continue
        if key in written:
            compare(str(key), written[key].numbers(written[key].memory.bytes), outcome, is_changed)
        elif key in returned:
            compare(key, numbers_of(results[returned.index(key)]), outcome, is_changed)
            first = next((v for p in PARAMETERS[name] if isinstance(v := arguments.get(p), View)), None)
            dtype = str(results[returned.index(key)].dtype).rpartition(".")[2]
            if first and key != "return" and type(results[returned.index(key)]) is not framework_of(first, dtype):
                raise Wrong(f"{key} is a {type(results[returned.index(key)])} but the first tensor {first!r}")


def try_operation(name: str, rng, report: dict):
    operation = OPERATIONS[name]
    arguments = operation.draw(Draw(rng))
    report["arguments"] = arguments
    names = list(PARAMETERS[name])
    report["changes"] = changes = []
    if rng.random() < 0.55:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if arguments and not any("vast" in change for change in changes):
                changes.append(pick(rng, MUTATIONS)(rng, arguments, names))
    views = [holder[key] for holder, key in views_in(arguments)]
    for view in views:
        view.memory.remember()
    try:
        result = call(name, arguments, rng)
    except (*ERRORS, RuntimeError) as error:
        if "Boolean value of Tensor" in str(error):  # what PyTorch says of one that is given as a flag
            return "no flag"
        if not isinstance(error, ERRORS) or not str(error):
            raise Wrong(f"{type(error)} is no error of ours: {error}") from error
        if not changes and operation.expect is not None:
            raise Wrong(f"refused what is right: {type(error).__name__}: {error}") from error
        scratch = (
            {
                v.memory: v.bytes_of(True)
                for key in ("logits", "gate_up")
                if name in ("sample_linear", "linear_candidates", "linear", "moe_mlp") and isinstance(v := arguments.get(key), View) and not is_vast(v)
            }
            if isinstance(error, ValueError)
            else {}
        )
        judge_memory(views, scratch)
        return type(error).__name__
    if operation.expect is None:
        raise Wrong("was not refused")
    if any(is_vast(view) for view in views):
        judge_memory([view for view in views if not is_vast(view)], {v.memory: True for v in views})
        return "vast"
    judge(
        name,
        arguments,
        views,
        result,
        is_changed=bool(changes),
        is_wild=any(change.startswith("wild") for change in changes),
    )
    return "changed but right" if changes else "right"


def one(seed: int, number: int, names: list[str]) -> str:
    """Makes one call and says how it ended; raises Wrong, or whatever a call may not raise, with all that is known."""
    rng = np.random.default_rng([seed, number])
    name = pick(rng, names)
    report: dict = {}
    try:
        with np.errstate(all="ignore"):  # NumPy's casts of numbers that do not fit
            how = SESSIONS[name](rng, report) if name in SESSIONS else try_operation(name, rng, report)
    except Exception as error:
        for line in traceback.format_exception(error):
            sys.stderr.write(line)
        error.add_note(f"{name}: {report}"[:3000])
        raise
    if alive:
        gc.collect()
        if alive:
            sys.stderr.write(f"{report}\n")
            raise Wrong(f"{name}: {list(alive.values())} was not given back")
    return how


def work(seed: int, first: int, count: int, names: list[str], shared, histogram) -> int:
    """In a child: the calls from `first` on; the number of the one at work is in `shared`."""
    for number in range(first, first + count):
        struct.pack_into("q", shared, 0, number)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                histogram[one(seed, number, names)] += 1
            except Exception as error:
                print(
                    f"call {number}: {type(error).__name__}: {error}",
                    *getattr(error, "__notes__", ()),
                    sep="\n",
                    file=sys.stderr,
                )
                return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=struct.unpack("I", os.urandom(4))[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--op", action="append", choices=[*OPERATIONS, *SESSIONS])
    parser.add_argument("--keep-going", action="store_true", help="go on behind a failure")
    options = parser.parse_args()
    names = options.op or [*OPERATIONS, *SESSIONS]
    print(f"fuzz_calls: seed {options.seed}, {options.calls} calls of {len(names)} operations", flush=True)
    gc.freeze()  # what is here already need not be looked at for what a call left behind
    shared, began, first, failures = mmap.mmap(-1, 1 << 16), time.monotonic(), options.first, 0
    end = first + options.calls
    total: collections.Counter = collections.Counter()
    while first < end:
        count = min(5000, end - first)
        struct.pack_into("q", shared, 8, 0)
        child = os.fork()
        if child == 0:
            histogram: collections.Counter = collections.Counter()
            status = work(options.seed, first, count, names, shared, histogram)
            text = repr(dict(histogram)).encode()
            shared[8 : 16 + len(text)] = struct.pack("q", len(text)) + text
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        size = struct.unpack_from("q", shared, 8)[0]
        total.update(ast.literal_eval(shared[16 : 16 + size].decode()) if size else {})
        first += count
        if status:
            failures += 1
            number = struct.unpack_from("q", shared, 0)[0]
            ops = "".join(f" --op {name}" for name in options.op or [])
            how = "failed or was ended" if os.WIFEXITED(status) else f"was killed by signal {os.WTERMSIG(status)}"
            print(
                f"call {number} {how}: python tests/fuzz_calls.py --seed {options.seed} --first {number} --calls 1{ops}",
                flush=True,
            )
            if not options.keep_going:
                break
            first = number + 1
    done, seconds = sum(total.values()), time.monotonic() - began
    print(f"{done} calls in {seconds:.0f} s: " + ", ".join(f"{count} {how}" for how, count in total.most_common()))
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())

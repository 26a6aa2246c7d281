"""Engines of several ranks on the CPU beside those of one: the same tokens; how they start, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_model
from lora_adapters import write_adapter
from rank_engine import OPTIONS, SIZES, answers, children, generate, nothing_left, traffic
from threads import in_threads
from tiny_engine import settle

import pagedkv
from pagedkv import LLM, AsyncEngine, Engine, SamplingParams
from pagedkv.engine import LoRARequest

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


# --- the same tokens


@pytest.mark.parametrize("num_ranks, behind", [(2, 0), (2, 1), (3, 0)])
def test_random_traffic(folder, num_ranks, behind):
    """In a pool too small for it: preemption, swaps, forks, masks, prefix hits, log probabilities."""
    requests = traffic(np.random.default_rng(num_ranks), 45)
    rng, preemptions = np.random.default_rng(9), 0
    for swap_space in (0, 1 << 20):
        options = OPTIONS | {"num_blocks": 24, "swap_space": swap_space, "max_num_batched_tokens": int(rng.integers(8, 60))}
        outputs = []
        for ranks in (1, num_ranks):
            with LLM(folder, tensor_parallel_size=ranks, **options) as llm:
                llm._runner.num_behind = behind
                outputs.append(generate(llm, requests))
                preemptions += llm.stats().num_preemptions
        one, several = outputs
        assert not [output.error for output in one + several if output.error]
        assert answers(several) == answers(one)
        for a, b in zip(one, several, strict=True):
            for x, y in zip(a.outputs, b.outputs, strict=True):
                assert_alike(x.logprobs, y.logprobs)
            assert_alike(a.prompt_logprobs, b.prompt_logprobs)
    assert preemptions


def assert_alike(one, other) -> None:
    assert (one is None) == (other is None)
    for a, b in zip(one or (), other or (), strict=True):
        assert (a is None) == (b is None) and (a or {}).keys() == (b or {}).keys()
        np.testing.assert_allclose(list((b or {}).values()), list((a or {}).values()), atol=1e-3)


def test_requests_that_come_and_go(folder):
    """Priorities, and aborts: what is left has the tokens that it has alone."""
    rng = np.random.default_rng(4)
    requests = traffic(rng, 30)
    with LLM(folder, tensor_parallel_size=1, **OPTIONS | {"num_blocks": 200}) as llm:
        expected = answers(generate(llm, requests))
    with Engine(folder, tensor_parallel_size=2, **OPTIONS | {"num_blocks": 24}) as engine:
        aborted, found = set(), defaultdict(dict)
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(prompt, params, str(i), priority=int(rng.integers(0, 3)))
            if rng.random() < 0.2:
                aborted.add(i)
                engine.abort(str(i))
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[int(output.request_id)].update((one.index, one) for one in output.outputs if one.finish_reason)
        assert found.keys() == set(range(len(requests))) and aborted
        for i, answer in found.items():
            if any(one.finish_reason == "abort" for one in answer.values()):
                assert i in aborted
            else:
                assert sorted((index, one.token_ids) for index, one in answer.items()) == expected[i], i


def test_embeddings(folder):
    prompts = [[1, 2, 3], [4] * 30, [7, 8]]
    vectors = []
    for ranks in (1, 2):
        with LLM(folder, tensor_parallel_size=ranks, **OPTIONS) as llm:
            vectors.append([output.embedding for output in llm.embed(prompts, use_tqdm=False)])
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4)


def test_tokens_are_drawn_without_logits(folder, monkeypatch):
    """Where no row asks for more than a temperature and a seed, no rank gathers them."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        gathered = []
        monkeypatch.setattr(llm._runner.model.head, "logits", lambda *args: gathered.append(args))
        drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
        generate(llm, [([1, 2, 3], GREEDY), ([4, 5], drawn)])
        assert not gathered


def test_adapters(tmp_path):
    write_model(tmp_path / "base")
    names = {"a": {"seed": 1}, "b": {"seed": 2, "r": 7, "targets": ("q_proj", "v_proj", "down_proj")}}
    for name, how in names.items():
        write_adapter(tmp_path / name, **how)
    requests = [None, *(LoRARequest(name, i + 1, tmp_path / name) for i, name in enumerate(names)), None]
    found = []
    for ranks in (1, 2):
        options = OPTIONS | {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
        with LLM(tmp_path / "base", tensor_parallel_size=ranks, **options) as llm:
            outputs = llm.generate([[5, 6, 7]] * 4, GREEDY, lora_request=requests, use_tqdm=False)
            found.append(answers(outputs))
    assert found[0] == found[1] and len({str(each) for each in found[0]}) == 3


def test_the_pool_is_resized_on_all_ranks(folder):
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = answers(generate(llm, traffic(np.random.default_rng(2), 9)))
        for size in (60, 35, 50):
            assert llm.resize_cache(size) == size == llm.manager.num_blocks
            assert answers(generate(llm, traffic(np.random.default_rng(2), 9))) == expected


def test_dummy_weights(folder):
    with LLM(folder, tensor_parallel_size=2, load_format="dummy", **OPTIONS) as llm:
        assert len(generate(llm, [([1, 2], GREEDY)])[0].outputs[0].token_ids) == 8


# --- refused


@pytest.mark.parametrize(
    "value, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), (9, ValueError)]
)
def test_bad_numbers(folder, value, error):
    with nothing_left(), pytest.raises(error, match=f"tensor_parallel_size is {value}"):
        LLM(folder, tensor_parallel_size=value, **OPTIONS)


def test_the_cache_is_not_saved(folder, tmp_path):
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        for call in (llm.save_cache, llm.load_cache):
            with pytest.raises(NotImplementedError, match="tensor_parallel_size is 2"):
                call(tmp_path / "cache")
        llm.generate([[1]], GREEDY, use_tqdm=False)


# --- starts and ends

SCRIPT = """
from pagedkv import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, device="cpu", block_size=4, num_blocks=40)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""
IN_A_LOOP = """
import asyncio
from pagedkv import AsyncEngine, SamplingParams
async def main():
    engine = AsyncEngine({folder!r}, tensor_parallel_size=2, device="cpu", block_size=4, num_blocks=40)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async for output in engine.generate([1, 2, 3], params):
        pass
    print(output.outputs[0].token_ids)
asyncio.run(main())
"""
IN_A_NOTEBOOK = """
import code
console = code.InteractiveInterpreter()
console.runsource({script!r}, symbol="exec")
"""


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **OPTIONS) as llm:
        return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("way", ["script", "-", "-c", "loop", "notebook"])
def test_starts_without_a_guard(folder, expected, tmp_path, way):
    """From a script, from standard input, in an event loop, in cells of an interpreter. (No main is imported again: the
    script would start engines without end.)"""
    script = (IN_A_LOOP if way == "loop" else SCRIPT).format(folder=str(folder))
    command, given = [sys.executable, "-c", script], None
    if way == "script":
        (tmp_path / "logging.py").write_text("raise ImportError('a file beside the script')")
        (tmp_path / "cells").mkdir()
        (tmp_path / "cells" / "run.py").write_text(script)
        command = [sys.executable, str(tmp_path / "cells" / "run.py")]
    elif way == "-":
        command, given = [sys.executable, "-"], script
    elif way == "notebook":
        command = [sys.executable, "-c", IN_A_NOTEBOOK.format(script=script)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, cwd=tmp_path if way == "script" else None)
    assert done.returncode == 0 and done.stdout.split("\n")[0] == str(expected), done.stderr
    assert "Error" not in done.stderr


def test_starts_where_its_package_is_not_found_any_more(folder, expected, tmp_path):
    """It was imported by a relative path, and the working directory is another one now, which has gone. Standard input
    is closed, so that another file may have its number."""
    (tmp_path / "pagedkv").symlink_to(Path(pagedkv.__file__).parent)
    away = "import os, sys\nsys.path.insert(0, '')\nimport pagedkv\nos.close(0)\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')"
    script = away + SCRIPT.format(folder=str(folder)) + "llm.close()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.split("\n")[0] == str(expected), done.stderr


def test_starts_the_package_that_it_is(folder, expected, tmp_path):
    """Though a path has been added where another version of it lies."""
    (tmp_path / "pagedkv").mkdir()
    (tmp_path / "pagedkv" / "__init__.py").write_text("")
    script = f"import sys\nfrom pagedkv import LLM\nsys.path.insert(0, {str(tmp_path)!r})" + SCRIPT.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split("\n")[0] == str(expected), done.stderr


def test_starts_in_a_thread_that_the_main_one_does_not_wait_for(folder, expected):
    """The main thread has returned; what it has started goes on. Weights that are converted, by several threads, too."""
    script = f"""
import threading
from pagedkv import LLM
def serve():
    threading.main_thread().join()
    LLM({str(folder)!r}, device="cpu", num_blocks=40, quantization="fp8").save_cache({str(folder / "cache")!r})
    exec({SCRIPT.format(folder=str(folder))!r})
threading.Thread(target=serve).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split("\n")[0] == str(expected) and not done.stderr, done.stderr


def test_ctrl_c_is_for_the_first_rank_alone(folder, expected):
    """It decides what an interrupt of the terminal means, while the others start, too."""
    often = """
import os, signal, threading, time
def interrupt():
    for _ in range(2000):
        os.killpg(0, signal.SIGINT)
        time.sleep(0.0002)
signal.signal(signal.SIGINT, lambda *_: None)
threading.Thread(target=interrupt, daemon=True).start()
"""
    command = [sys.executable, "-c", often + SCRIPT.format(folder=str(folder))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert done.returncode == 0 and done.stdout.split("\n")[0] == str(expected), done.stderr


def test_two_engines_from_threads(folder, expected):
    """At once, of two and of three ranks, each made in a thread of its own that ends before the engine is used."""
    with nothing_left():
        shared_memory = Path("/dev/shm")
        before = sorted(shared_memory.iterdir())
        made = in_threads(lambda number: LLM(folder, tensor_parallel_size=number, **OPTIONS), (2, 3))
        assert len(children()) == 3 and sorted(shared_memory.iterdir()) == before
        time.sleep(0.2)
        for _ in range(2):
            for llm in made:
                assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        made[0].close()
        assert made[1].generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        made[1].close()
        made.clear()
        del llm


def test_async_engine_over_ranks(folder, expected):
    async def main():
        async with AsyncEngine(folder, tensor_parallel_size=2, **OPTIONS) as engine:
            outputs = [output async for output in engine.generate([1, 2, 3], GREEDY)]
            return outputs[-1].outputs[0].token_ids

    with nothing_left():
        assert asyncio.run(main()) == expected


def test_idle_ranks_do_not_work(folder):
    """They sleep until they are told something."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        generate(llm, [([1, 2], GREEDY)])
        settle(llm)
        (pid,) = children()

        def ticks() -> int:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            return int(fields[11]) + int(fields[12])

        before = ticks()
        time.sleep(1)
        assert ticks() - before <= 5, "of 100 a second"

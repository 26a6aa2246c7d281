"""Engine.resize_cache, save_cache and load_cache: the tokens stay the same, and nothing is half done."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, write_model
from tiny_engine import by_hand, engine, generate

import pagedkv
from pagedkv import LLM, OutOfBlocks, SamplingParams, ops
from pagedkv.engine.cache import snapshot
from pagedkv.models.files import CheckpointError
from pagedkv.models.safetensors import SafetensorsFile

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CPU = ("cpu", 1)


@pytest.fixture
def anywhere(device):
    return device, 1


def draw_prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    return [stem[: rng.choice([0, 20, 40])] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def tokens_of(llm: LLM, prompts) -> list[list[int]]:
    return [output.token_ids for output in generate(llm, prompts, GREEDY)]


# --- resize


def test_the_pool_changes_its_size_while_requests_run(folder, anywhere, seed):
    rng, prompts = random.Random(seed), draw_prompts(seed, 40)
    with engine(folder, anywhere, num_blocks=400) as llm:
        expected = tokens_of(llm, prompts)
    with engine(folder, anywhere, num_blocks=60) as llm:
        results, refused = [], 0
        threads = [threading.Thread(target=lambda i=i: results.append((i, tokens_of(llm, prompts[i : i + 5])))) for i in range(0, 40, 5)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            size = rng.randint(40, 300)
            try:
                assert llm.resize_cache(size) == size == llm.manager.num_blocks
            except OutOfBlocks as error:
                assert "pages are in use, the last of them is page" in str(error)
                refused += 1
            time.sleep(0.001)
        for thread in threads:
            thread.join()
        llm.manager.check()
        assert [tokens for _, part in sorted(results) for tokens in part] == expected
        llm.resize_cache(1)
        assert llm.manager.num_blocks == 1 and "1 pages of 4 tokens" in repr(llm)
        llm.resize_cache(200)
        assert tokens_of(llm, prompts) == expected


def test_no_unfinished_request_loses_its_room(folder, anywhere):
    """A pool that is too small for one of them is refused, and nothing changes."""
    with engine(folder, anywhere) as llm:
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        expected = generate(llm, [[1, 2, 3]], long)[0].token_ids
        by_hand(llm).add_request([1, 2, 3], long, "long")
        llm.step()
        with pytest.raises(OutOfBlocks, match="num_blocks is 15 but request 'long' may need 16"):
            llm.resize_cache(15)
        assert llm.resize_cache(16) == 16
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert outputs[-1].error is None and outputs[-1].outputs[0].token_ids == expected
        assert llm.resize_cache(4) == 4


def test_memory_comes_back(folder):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with LLM(folder, device="cpu", block_size=16, num_blocks=100) as llm:
        before, page = resident(), llm._runner.caches.page_bytes
        llm.resize_cache(kv_cache_memory=256 << 20)
        assert llm.manager.num_blocks == (256 << 20) // page
        for pair in llm._runner.caches.layers:
            for cache in pair:
                cache[: llm.manager.num_blocks].copy_(np.ones((llm.manager.num_blocks, *cache.shape[1:]), np.float32))
        assert resident() - before > 200 << 20
        llm.resize_cache(100)
        assert resident() - before < 50 << 20


@pytest.mark.alone
def test_graphs_read_the_pool_after_it_grew(folder, cuda, seed):
    """They were captured over a pool of 30 pages; later requests lie behind those. And the GPU has its memory back."""
    prompts = draw_prompts(seed, 8)
    with engine(folder, (cuda, 1), num_blocks=400) as llm:
        expected = tokens_of(llm, prompts)
    with engine(folder, (cuda, 1), num_blocks=30) as llm:
        tokens_of(llm, prompts[:2])
        llm.resize_cache(400)
        generate(llm, [[i] * 90 for i in range(8)], GREEDY)
        assert tokens_of(llm, prompts) == expected
        free = ops.memory_info(cuda)[0]
        llm.resize_cache(kv_cache_memory=8 << 30)
        assert free - ops.memory_info(cuda)[0] > 7 << 30
        assert tokens_of(llm, prompts) == expected
        llm.resize_cache(100)
        assert abs(free - ops.memory_info(cuda)[0]) < 1 << 28
        assert tokens_of(llm, prompts) == expected
    ops.check_errors(cuda)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({}, ValueError, "num_blocks or kv_cache_memory: give one of them"),
        ({"num_blocks": 5, "kv_cache_memory": 10**6}, ValueError, "give one of them"),
        ({"num_blocks": 0}, ValueError, "num_blocks is 0"),
        ({"num_blocks": "7"}, TypeError, "num_blocks is '7'"),
        ({"kv_cache_memory": 5}, ValueError, "kv_cache_memory is 5 bytes but one page needs"),
        ({"num_blocks": 10**12}, MemoryError, "num_blocks is 1000000000000 but this machine has room for"),
    ],
)
def test_bad_sizes(folder, options, error, message):
    with engine(folder, CPU) as llm:
        with pytest.raises(error, match=message):
            llm.resize_cache(**options)
        assert llm.manager.num_blocks == 200


# --- save and load


def saved(folder, path, prompts, place=CPU, **options) -> list[list[int]]:
    """The tokens where all prompts are in the cache, as they will be after loading it: other steps round otherwise."""
    with engine(folder, place, num_blocks=400, **options) as llm:
        tokens_of(llm, prompts)
        tokens = tokens_of(llm, prompts)
        num_cached = llm.manager.num_cached_blocks
        assert 10 < llm.save_cache(path) <= num_cached  # content that is there twice is saved once
    return tokens


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}, {"block_size": 16}], ids=str)
def test_a_cache_is_there_again(folder, anywhere, tmp_path, seed, options):
    """The same hits as without the restart, and the same tokens."""
    path, prompts = tmp_path / "cache", draw_prompts(seed, 20)
    expected = saved(folder, path, prompts, anywhere, **options)
    assert os.stat(path).st_mode & 0o077 == 0, "others may read the prompts"
    with engine(folder, anywhere, num_blocks=400, **options) as llm:
        num_pages = llm.load_cache(path)
        llm.manager.check()
        assert num_pages == llm.manager.num_cached_blocks
        outputs = generate(llm, prompts, GREEDY)
        size = llm.manager.block_size
        assert all(output.num_cached_tokens == len(prompt) // size * size for prompt, output in zip(prompts, outputs, strict=True))
        assert [output.token_ids for output in outputs] == expected
        assert llm.load_cache(path) == 0, "it is there already"
        assert tokens_of(llm, prompts) == expected


def test_salts_are_kept(folder, tmp_path):
    with engine(folder, CPU) as llm:
        llm.generate([[1] * 30], GREEDY, salt=b"\0secret", use_tqdm=False)
        llm.save_cache(tmp_path / "cache")
    with engine(folder, CPU) as llm:
        llm.load_cache(tmp_path / "cache")
        hits = [llm.generate([[1] * 30], GREEDY, salt=salt, use_tqdm=False)[0].num_cached_tokens for salt in (b"", b"\0secret")]
    assert hits == [0, 28]


def test_a_smaller_pool_takes_what_fits(folder, anywhere, tmp_path, seed):
    path, prompts = tmp_path / "cache", draw_prompts(seed, 20)
    expected = saved(folder, path, prompts, anywhere)
    with engine(folder, anywhere, num_blocks=50) as llm:
        assert llm.load_cache(path) == 50
        assert tokens_of(llm, prompts) == expected


def test_while_requests_run(folder, anywhere, tmp_path, seed):
    path, prompts = tmp_path / "cache", draw_prompts(seed, 30)
    expected = saved(folder, path, prompts[:10], anywhere)
    with engine(folder, anywhere, num_blocks=400) as llm:
        results = []
        thread = threading.Thread(target=lambda: results.extend(tokens_of(llm, prompts)))
        thread.start()
        for _ in range(5):
            llm.load_cache(path)
            llm.save_cache(tmp_path / "other")
        thread.join()
        llm.manager.check()
        assert results[:10] == expected and tokens_of(llm, prompts) == results


def damage(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + b"x" * rng.randint(1, 9)
    if kind == 2:
        return data[:at] + data[at + 1 :]
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def test_damaged_files_are_refused_whole(folder, tmp_path, seed):
    rng, path = random.Random(seed), tmp_path / "cache"
    saved(folder, path, draw_prompts(seed, 5))
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    with engine(folder, CPU) as llm:
        for number in range(150):
            bad = damage(good, rng) if number % 2 else damage(good[: 8 + length], rng) + good[8 + length :]
            if bad == good:
                continue
            path.write_bytes(bad)
            try:
                num_pages = llm.load_cache(path)
            except (CheckpointError, NotImplementedError):
                assert llm.manager.num_cached_blocks == 0
            else:  # a byte of the header that says nothing, such as a blank
                assert json.loads(bad[8 : 8 + length]) == json.loads(good[8 : 8 + length]) and num_pages > 0
                llm.manager.reset_prefix_cache()
        path.write_bytes(good)
        assert llm.load_cache(path) > 0
        with pytest.raises(FileNotFoundError):
            llm.load_cache(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 1}, "model is"),
        ({"rms_norm_eps": 1e-5}, "config is"),
        ({"options": {"dtype": "bfloat16"}}, "dtype is 'float32' but this engine's is 'bfloat16'"),
        ({"options": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype is"),
        ({"options": {"block_size": 8}}, "block_size is '4' but this engine's is '8'"),
    ],
    ids=str,
)
def test_another_models_file_is_refused(folder, tmp_path, change, message):
    path = tmp_path / "cache"
    saved(folder, path, draw_prompts(1, 5))
    change = dict(change)
    options = change.pop("options", {})
    other = write_model(tmp_path / "other", **change)
    with engine(other, CPU, **options) as llm:
        with pytest.raises(ValueError, match=message):
            llm.load_cache(path)
        assert llm.manager.num_cached_blocks == 0


@pytest.mark.parametrize("salts", [None, "[1]", "5", '["xy"]', "[" * 100_000, "{"])
def test_a_file_with_a_right_digest_and_bad_salts(folder, tmp_path, salts):
    path = tmp_path / "cache"
    metadata, tensors = saved_parts(folder, path)
    if salts is None:
        del metadata["salts"]
    else:
        metadata["salts"] = salts
    check_refused(folder, path, metadata, tensors, "its salts are no list of hexadecimal strings")


def test_a_file_with_a_right_digest_and_too_few_keys(folder, tmp_path):
    """The cache that was there before stays."""
    path = tmp_path / "cache"
    metadata, tensors = saved_parts(folder, path)
    tensors["kv"] = ("U8", [0, *tensors["kv"][1][1:]], b"")
    check_refused(folder, path, metadata, tensors, r"kv has shape \[0, ")


def saved_parts(folder, path):
    """What is in a saved cache: its metadata, and the dtype, shape and bytes of its tensors."""
    saved(folder, path, draw_prompts(1, 5))
    file = SafetensorsFile(path)
    metadata = {name: value for name, value in file.metadata.items() if name != "digest"}
    return metadata, {n: (each.dtype, list(each.shape), file.content(n).tobytes()) for n, each in file.entries.items()}


def check_refused(folder, path, metadata, tensors, message):
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    contents = [content for _, _, content in tensors.values()]
    snapshot._write_whole(path, lambda file: snapshot._write(file, shapes, metadata, iter(contents)))
    with engine(folder, CPU) as llm:
        generate(llm, draw_prompts(2, 5), GREEDY)
        before = llm.manager.num_cached_blocks
        with pytest.raises(CheckpointError, match=message):
            llm.load_cache(path)
        assert llm.manager.num_cached_blocks == before > 0


def test_a_file_that_is_no_cache(folder, tmp_path):
    with engine(folder, CPU) as llm, pytest.raises(ValueError, match="no saved cache"):
        llm.load_cache(folder / "model.safetensors")
    with engine(folder, CPU, enable_prefix_caching=False) as llm:
        assert llm.save_cache(tmp_path / "empty") == 0


def test_an_error_while_saving_leaves_the_old_file(folder, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    saved(folder, path, draw_prompts(1, 5))
    before = path.read_bytes()
    with engine(folder, CPU) as llm:
        generate(llm, draw_prompts(2, 9), GREEDY)
        with pytest.raises(FileNotFoundError):
            llm.save_cache(tmp_path / "nowhere" / "cache")
        monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.save_cache(path)
        monkeypatch.undo()
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["cache"]
        assert generate(llm, [[1, 2]], GREEDY)[0].error is None


KILLED = """
import sys
from pagedkv import LLM, SamplingParams
from pagedkv.engine.cache import snapshot
with LLM(sys.argv[1], device="cpu", block_size=4, num_blocks=400) as llm:
    llm.generate([[i] * 40 for i in range(20)], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    write = snapshot._write_all
    snapshot._write_all = lambda file, data: [write(file, data[i : i + 256]) for i in range(0, len(data), 256)]
    print("saving", flush=True)
    while True:
        llm.save_cache(sys.argv[2])
"""


def test_a_kill_while_saving_leaves_a_whole_file(folder, tmp_path, seed):
    rng, path = random.Random(seed), tmp_path / "cache"
    saved(folder, path, [[i] * 40 for i in range(20)])
    for _ in range(5):
        environment = os.environ | {"PYTHONPATH": str(Path(pagedkv.__file__).parents[1])}
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(path)], stdout=subprocess.PIPE, env=environment)
        assert process.stdout.readline() == b"saving\n"
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with engine(folder, CPU, num_blocks=400) as llm:
            assert llm.load_cache(path) > 100
    saved(folder, path, [[1] * 40])
    assert os.listdir(tmp_path) == ["cache"], "what the killed processes left is gone"


def test_what_a_killed_process_leaves_is_removed(folder, tmp_path):
    """By the next save to the same path; what another process still writes, and other files, stay."""
    path, stale, living = tmp_path / "cache[1]", ".cache[1].123", ".cache[1].456"
    others = [".cache[1].old", ".cache1.17", "cache[1].17", ".cache[1]x.17", ".cache[1]."]
    for name in [stale, living, *others]:
        (tmp_path / name).write_bytes(b"half of a cache")
    lock = os.open(tmp_path / living, os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    saved(folder, path, draw_prompts(3, 5))
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, living, *others])
    os.close(lock)
    saved(folder, path, draw_prompts(4, 5))
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, *others])


def test_two_saves_at_once(folder, tmp_path, monkeypatch):
    """Of two engines of one process, to the same path: the first goes on, the second says why it does not."""
    path, second = tmp_path / "cache", []
    with engine(folder, CPU) as llm, engine(folder, CPU) as other:
        for each in (llm, other):
            generate(each, draw_prompts(5, 5), GREEDY)
        write = snapshot._write

        def beside(*args):
            if not second:
                second.append(None)
                with pytest.raises(BlockingIOError, match="another thread saves a cache there now"):
                    other.save_cache(path)
            return write(*args)

        monkeypatch.setattr(snapshot, "_write", beside)
        num_pages = llm.save_cache(path)
        assert second and os.listdir(tmp_path) == ["cache"]
        assert other.load_cache(path) == 0 < num_pages, "it has them all"

"""Streams and graphs of csrc/py over a GPU that computes nothing (fake_gpu.c), where threads meet at the worst moment."""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pagedkv

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout"),
    pytest.mark.skipif(not Path(sysconfig.get_paths()["include"], "Python.h").exists(), reason="no Python.h"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with a pagedkv whose backends are fake_gpu.c's."""
    folder = tmp_path_factory.mktemp("fake")
    sources = [path for pattern in ("*.c", "block_manager/*.c", "ops/*.c", "py/*.c") for path in (ROOT / "csrc").glob(pattern)]
    options = ["-std=c11", "-O0", "-fPIC", "-DPAGEDKV_WITH_CUDA", "-DPy_LIMITED_API=0x030B0000",
               f'-DPAGEDKV_VERSION="{pagedkv.__version__}"', f"-I{ROOT / 'csrc'}",
               f"-I{sysconfig.get_paths()['include']}", f"-I{np.get_include()}"]  # fmt: skip

    def build(source: Path) -> str:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        subprocess.run([COMPILER, *options, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(build, [*sources, ROOT / "tests" / "fake_gpu.c"]))
    place = folder / "pagedkv"
    place.mkdir()
    for entry in (ROOT / "pagedkv").iterdir():
        if entry.suffix != ".so":
            (place / entry.name).symlink_to(entry)
    subprocess.run([COMPILER, "-shared", *objects, "-lm", "-lpthread", "-o", place / "_C.abi3.so"], check=True)
    return folder


BEFORE = """
import os, threading, time
import pagedkv
from pagedkv import Event, Graph, Stream, ops
def empty(*shape): return pagedkv.empty(shape, device="cuda")
def say(*words): print(*words, flush=True)
x, weight = empty(4, 8), empty(8)
"""


@pytest.fixture
def run(package):
    """Runs a program after BEFORE; returns the lines that it and the fake GPU say."""

    def run(program: str, **environment: str) -> list[str]:
        environment = os.environ | {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1"} | environment
        done = subprocess.run([sys.executable, "-c", BEFORE + program], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


def test_a_stream_made_while_another_one_ends(run):
    """It may get the other's handle, and is no less alive for that: who reads what it wrote waits for it."""
    lines = run("""
def chain(first, second):
    ops.rms_norm(ops.rms_norm(x, weight, stream=first), weight, stream=second)
old, other = Stream(), Stream()
address = old.cuda_stream
chain(old, other)
def drop():
    global old
    del old
thread = threading.Thread(target=drop)
thread.start()
time.sleep(0.05)
new = Stream()
thread.join()
assert new.cuda_stream == address
say("then")
chain(new, other)
""", FAKE_SLOW_END="1")  # fmt: skip
    before, after = lines[: lines.index("then")], lines[lines.index("then") :]
    assert sum(line.startswith("wait") for line in before) == 1
    assert sum(line.startswith("wait") for line in after) == 1


def test_two_threads_capture_graphs_with_a_tensor_in_common(run):
    """And each graph orders its own replays by it."""
    lines = run("""
outs, shared = [empty(4, 8) for _ in range(200)], empty(4, 8)
streams, graphs = [Stream(), Stream()], [Graph(), Graph()]
inside, done = threading.Event(), threading.Event()
def first():
    with graphs[0].capture(streams[0]):
        for out in outs:
            ops.rms_norm(x, weight, out=out)
        ops.rms_norm(shared, weight, out=outs[0])
        inside.set()
        done.wait()
thread = threading.Thread(target=first)
thread.start()
inside.wait()
with graphs[1].capture(streams[1]):
    ops.rms_norm(shared, weight, out=shared)
    ops.rms_norm(shared, weight, out=x)
done.set()
thread.join()
for turn in range(2):
    say("writer")
    graphs[1].replay(streams[1])  # after the reader, from the second turn on
    say("reader")
    graphs[0].replay(streams[0])
say("own")
graphs[0].replay(streams[0])
""")
    words = [line.split()[0] for line in lines]
    turns = [[name for name in words[start:] if name != "destroyed"] for start, word in enumerate(words) if word == "writer"]
    waits = [["wait" in turn[: turn.index("reader")], "wait" in turn[turn.index("reader") :]] for turn in turns[1:]]
    assert turns[0][:2] == ["writer", "launch"] and waits == [[True, True]]
    assert words[words.index("own") :][:2] == ["own", "launch"], "what it wrote itself needs no wait"


def test_a_capture_that_ends_is_not_over_yet(run):
    """Its end lets other threads run, which cannot have the Graph before."""
    lines = run("""
graph, stream, other = Graph(), Stream(), Stream()
inside = threading.Event()
def first():
    with graph.capture(stream):
        ops.rms_norm(x, weight, out=x)
        inside.set()
thread = threading.Thread(target=first)
thread.start()
inside.wait()
time.sleep(0.05)
for use in (lambda: graph.capture(other), graph.replay):
    try:
        use()
    except RuntimeError as error:
        say(error)
thread.join()
graph.replay()
""", FAKE_SLOW_END="1")  # fmt: skip
    assert lines[:2] == ["this Graph is captured already", "this Graph is not captured yet"]
    assert lines[2].startswith("launch")


def test_a_capture_that_cannot_begin(run):
    lines = run("""
import gc, sys
graph, stream = Graph(), Stream()
for turn in range(3):
    try:
        with graph.capture(stream):
            ops.rms_norm(x, weight, out=x)
    except pagedkv.CudaError as error:
        say(error, len(gc.get_referents(graph)))
say(graph, gc.isenabled())
""", FAKE_FAILURES="2")  # fmt: skip
    assert lines[:2] == ["the capture cannot begin 2"] * 2  # its type and its stream
    assert lines[2] == "Graph(device='cuda:0', num_nodes=1) True"


def test_a_child_of_fork_gives_nothing_back(run):
    """What the parent's driver made is the parent's."""
    lines = run("""
graph, stream, event = Graph(), Stream(), Event()
with graph.capture(stream):
    ops.rms_norm(x, weight, out=x)
if os.fork() == 0:
    del graph, stream, event
    say("child")
    os._exit(0)
os.wait()
del graph, stream, event
say("parent")
""")
    assert lines == ["child", "destroyed 2", "destroyed 0", "destroyed 1", "parent"]

"""Fixtures of the whole suite.

seed, rng   fresh random input for every test and every run; a failure prints the seed, PAGEDKV_TEST_SEED=n repeats it
device      "cpu" and "cuda:0" in turn (the second has the mark gpu and skips where there is none)
lesser_isa  an instruction set below the CPU's own, for PAGEDKV_CPU_ISA, which caps the choice; skips what is none
cuda        "cuda:0", for tests with the mark gpu; skips where there is none
torch       PyTorch, for tests with the mark gpu; no bad id may be recorded before or behind them that they do not
            expect
folder      a tiny model with random weights (a file of tests may have another one)
place       where an engine of it computes, and how many steps late its host learns the tokens: one on a GPU, but both work
llm         an engine of it in such a place (tiny_engine.py); cpu_llm: on the CPU

`pytest` tests the installed package, wherever it is run; `python -m pytest` in a checkout tests the checkout's own,
which needs `make build`. The import below fails where the package found is a folder of sources without an extension.
"""

import gc
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

import pagedkv
from pagedkv import ops

# Modules that check for several test files: an assertion that fails shows its values there, too.
pytest.register_assert_rewrite("fake_model", "flashinfer_batches", "model_oracle", "scheduled_engine")

# Tests start interpreters of their own, in any folder: these import the pagedkv that this one did.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(pagedkv.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A test sends a Ctrl-C, which Python would ignore where a shell started the suite in its background.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What the tests' modules have imported (torch, transformers) stays: a collection of garbage need not walk through it.
    Each engine asks for one when it starts, and took 0.3 s for it here."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else xgrammar tells of objects that are left


@pytest.fixture
def environment() -> dict[str, str]:
    """Of an interpreter that imports the tests' own modules, too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])}


@pytest.fixture
def seed(request) -> int:
    fixed = os.environ.get("PAGEDKV_TEST_SEED")
    value = int(fixed) if fixed else random.SystemRandom().randrange(2**31)
    print(f"PAGEDKV_TEST_SEED={value}")  # shown with the captured output of a failure
    return value


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


ISAS = ["generic", "avx2", "avx512"]


@pytest.fixture(params=ISAS)
def lesser_isa(request) -> str:
    """avx512 is one, too, where the CPU has AVX512_BF16: PAGEDKV_CPU_ISA=avx512 does without."""
    own = ops.build_info()["isa"]
    goes_beyond = own == "avx512" and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    if ISAS.index(request.param) >= ISAS.index(own) + goes_beyond:
        pytest.skip(f"{own} is what the other tests run here")
    return request.param


@pytest.fixture
def cuda() -> str:
    problem = ops.build_info()["cuda_problem"]
    if problem is not None:
        pytest.skip(problem)
    return "cuda:0"


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param if request.param == "cpu" else request.getfixturevalue("cuda")


@pytest.fixture
def torch(cuda):
    return pytest.importorskip("torch", reason="these tests use torch's tensors, streams and graphs")


@pytest.fixture(autouse=True)
def no_error_is_left(request):
    """A test on a GPU leaves nothing in its status word that it did not expect."""
    yield
    if request.node.get_closest_marker("gpu") and ops.build_info()["cuda_problem"] is None:
        ops.check_errors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from checkpoints import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[0, 1])
def place(request, device) -> tuple[str, int]:
    return device, request.param


@pytest.fixture
def llm(folder, place):
    from tiny_engine import engine

    with engine(folder, place) as llm:
        yield llm


@pytest.fixture(params=[0, 1])
def cpu_llm(folder, request):
    from tiny_engine import engine

    with engine(folder, ("cpu", request.param)) as llm:
        yield llm

"""What an engine says under the logger "pagedkv": at its start, of preemptions, and of requests that failed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from checkpoints import write_model
from tiny_engine import GREEDY, by_hand, generate

from pagedkv import LLM, SamplingParams

OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8}


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.DEBUG, "pagedkv")
    caplog.set_level(logging.NOTSET, "pagedkv.engine.llm")  # the commands, which other tests call, change it

    def lines(level: int) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == level]

    lines.clear = caplog.clear
    return lines


def test_the_start(tmp_path, said):
    folder = write_model(tmp_path, generation={"temperature": 0.5, "top_k": 7, "num_beams": 2})
    with LLM(folder, **OPTIONS) as llm:
        assert said(logging.INFO)[0] == f"{folder}/generation_config.json: requests without params have temperature=0.5, top_k=7"
        weights, ready = said(logging.INFO)[1:]
        assert weights.startswith(f"weights of {folder} were loaded in ") and weights.endswith(" s")
        assert ready.startswith(f"{folder} is ready after ") and ready.endswith(repr(llm))
        assert "float32" in ready and "200 pages of 4 tokens" in ready and "cpu" in ready
        assert said(logging.WARNING) == [f"{folder}/generation_config.json: not followed: num_beams=2"]
        said.clear()
        assert generate(llm, ["abc"], GREEDY)[0].error is None
    assert said(logging.INFO) == said(logging.WARNING) == said(logging.DEBUG) == []


def test_requests_that_failed_are_told_once_a_batch(folder, said):
    with LLM(folder, **OPTIONS) as llm:
        generate(llm, ["abc", [], "abc", [99], [1] * 300], GREEDY)
        assert said(logging.WARNING) == ["3 of 5 requests failed, the first of them prompts[1]: ValueError: the prompt is empty"]
        said.clear()
        llm.embed(["abc", "ab\ud800"], use_tqdm=False)
        (line,) = said(logging.WARNING)
        assert line.startswith("1 of 2 requests failed, the first of them prompts[1]: UnicodeEncodeError: ")


def test_the_first_preemption_names_the_knob(folder, said):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(folder, **OPTIONS | {"num_blocks": 20}) as llm:
        generate(llm, [[i] * 9 for i in range(8)], params)
        assert llm.stats().num_preemptions > 1
        (line,) = said(logging.WARNING)
        for word in ("preempted", "num_blocks", "kv_cache_memory", "gpu_memory_utilization", "max_num_seqs", "swap_space"):
            assert word in line
        generate(llm, [[i] * 9 for i in range(8)], params)
        assert len(said(logging.WARNING)) == 1


def test_a_place_that_is_taken_is_no_warning(folder, said):
    with LLM(folder, **OPTIONS | {"max_num_seqs": 1}) as llm:
        by_hand(llm)
        said.clear()
        llm.add_request("abc", GREEDY, "low", priority=1)
        llm.step()
        llm.add_request("abc", GREEDY, "high")
        while len(llm._book):
            llm.step()
        assert llm.stats().num_preemptions == 1 and said(logging.WARNING) == []
        (line,) = said(logging.INFO)
        assert "preempted" in line and "max_num_seqs" in line


def test_no_handler_is_installed(folder):
    """Python itself shows warnings on stderr; INFO is shown where the user asks for it."""
    program = """
import logging, sys, json
from pagedkv import LLM, SamplingParams
if sys.argv[2] == "info":
    logging.basicConfig(level=logging.INFO)
before = list(logging.getLogger().handlers)
with LLM(sys.argv[1], device="cpu", num_blocks=40) as llm:
    llm.generate(["", "abc"], SamplingParams(max_tokens=1), use_tqdm=False)
loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("pagedkv")]
print(json.dumps([len(loggers), sum(len(each.handlers) for each in loggers), logging.getLogger().handlers == before]))
"""
    for mode in ("quiet", "info"):
        done = subprocess.run([sys.executable, "-c", program, str(folder), mode], capture_output=True, text=True, check=True)
        count, handlers, same = json.loads(done.stdout)
        assert count > 0 and handlers == 0 and same
        assert "1 of 2 requests failed" in done.stderr and ("is ready after" in done.stderr) == (mode == "info")

"""pagedkv and python -m pagedkv: output, help, and errors of one line."""

from __future__ import annotations

import pkgutil
import re
import socket
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from checkpoints import save_pretrained, write_model
from lora_adapters import write_adapter

import pagedkv
from pagedkv import cli
from pagedkv.cli import command_line
from pagedkv.cli import demo as demo_command
from pagedkv.cli.options import OF_A_LINE, engine_options, sampling_options
from pagedkv.engine.options import EngineOptions


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pagedkv", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def main(capsys, *args: str) -> tuple[int, str, str]:
    """In this process: starting Python many times takes long."""
    try:
        code = cli.main(list(args))
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_is_main():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("not a checkout")
    scripts = tomllib.loads(pyproject.read_text())["project"]["scripts"]
    assert {name: pkgutil.resolve_name(target) for name, target in scripts.items()} == {"pagedkv": cli.main}


def test_demo():
    result = run("demo")
    assert result.returncode == 0, result.stderr
    sums = re.findall(r"(\d+)\+(\d+)=(\d+)", result.stdout)
    assert len(sums) == 32 and all(int(a) + int(b) == int(c) for a, b, c in sums)
    assert "32 of 32 right" in result.stdout
    for word in ("prefill", "decode", "tokens/s", "TTFT", "pages", "shared", "found"):
        assert word in result.stdout
    shared = re.search(r"(\d+) of them shared", result.stdout)
    assert int(shared[1]) > 0
    assert "requests: 100%" in result.stderr


def test_demo_without_its_model(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo_command, "DEMO_MODEL", tmp_path / "gone")
    code, out, err = main(capsys, "demo")
    assert (code, out) == (1, "") and "the demo model is not in this installation" in err


def test_info():
    result = run("info")
    assert result.returncode == 0, result.stderr
    for word in ("pagedkv", "python", "numpy", "tokenizers", "cpu", "cuda", "threads", "isa", "blas"):
        assert word in result.stdout.lower()


def test_generate_from_a_folder_of_transformers(tmp_path):
    save_pretrained(tmp_path)
    result = run("generate", str(tmp_path), "12+34=", "abc", "--max-tokens", "5")
    assert result.returncode == 0, result.stderr
    assert "> 12+34=\n" in result.stdout and "> abc\n" in result.stdout
    notes = result.stderr.splitlines()
    assert all(re.fullmatch(r"pagedkv generate: prompt \d: the answer was cut after 5 tokens \(--max-tokens\)", line) for line in notes)


@pytest.mark.parametrize(
    ("args", "num_seqs"),
    [(["chat", "one", "two"], 1), (["chat"], 1), (["generate", "one"], 1), (["generate", *"abc"], 3),
     (["generate", *["a"] * 63], 63), (["generate", *["a"] * 64], None), (["generate", *["a"] * 300], None)],
    ids=lambda value: value if value is None or isinstance(value, int) else f"{value[0]}-{len(value) - 1}",
)  # fmt: skip
def test_few_requests_need_few_graphs(capsys, monkeypatch, tmp_path, args, num_seqs):
    """The engine is made for as many as there are; from 64 on its defaults are good."""
    asked = []

    def make(model, **options):
        asked.append((str(model), options.get("max_num_seqs")))
        raise ValueError("made")

    monkeypatch.setattr(pagedkv, "LLM", make)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert main(capsys, args[0], str(tmp_path), *args[1:])[0] == 1
    assert asked == [(str(tmp_path), num_seqs)]


def test_generate_options(capsys, tmp_path):
    write_model(tmp_path)
    args = ("generate", str(tmp_path), "abc", "--max-tokens", "30", "--temperature", "1")
    first = main(capsys, *args, "--seed", "1")
    assert first[0] == 0 and first[1].startswith("> abc\n")
    assert main(capsys, *args, "--seed", "1", "--block-size", "3") == first
    assert main(capsys, *args, "--seed", "2")[1] != first[1]


def test_an_adapter(capsys, tmp_path):
    write_model(tmp_path / "base")
    write_adapter(tmp_path / "a", r=4)
    args = "--device", "cpu", "--max-tokens", "9", "--temperature", "0", "--ignore-eos"
    plain, adapted = (main(capsys, "generate", str(tmp_path / "base"), "1+1=", *args, *lora)
                      for lora in ((), ("--lora", str(tmp_path / "a"))))  # fmt: skip
    assert plain[0] == adapted[0] == 0 and plain[1] != adapted[1]
    code, _, err = main(capsys, "generate", str(tmp_path / "base"), "1+1=", *args, "--lora", str(tmp_path / "a"), "--max-lora-rank", "2")
    assert code == 1 and "but max_lora_rank is 2" in err
    code, _, err = main(capsys, "generate", str(tmp_path / "base"), "1+1=", *args, "--lora", str(tmp_path / "b"))
    assert code == 1 and "no folder" in err


def test_texts_stand_anywhere(capsys, tmp_path):
    write_model(tmp_path)

    def prompts(*words):
        code, out, err = main(capsys, "generate", *words, "--max-tokens", "0")
        assert (code, out[-2:]) == (0, "\n\n"), err
        return [text.removeprefix("> ") for text in out.removesuffix("\n\n").split("\n\n\n")]

    model = str(tmp_path)
    assert prompts(model, "abc") == ["abc"]
    assert prompts(model, "--seed", "1", "abc") == ["abc"]
    assert prompts("--seed", "1", model, "abc", "cba") == ["abc", "cba"]
    assert prompts(model, "abc", "--seed", "1", "cba", "--top-k", "3", "bac") == ["abc", "cba", "bac"]
    assert prompts(model, "--seed", "1", "-5", "- a b", "--top-k", "3", "-.5") == ["-5", "- a b", "-.5"]
    command = ("generate", model, "--max-tokens", "0", "a")
    code, out, _ = main(capsys, *command, "--", "-abc", "--seed", "--")
    assert (code, out) == (0, "> a\n\n\n> -abc\n\n\n> --seed\n\n\n> --\n\n")


def test_what_fails_is_told_beside_what_does_not(capsys, tmp_path):
    write_model(tmp_path)
    code, out, err = main(capsys, "generate", str(tmp_path), "abc", "", "a\nb", "--max-tokens", "0")
    assert (code, out) == (1, "> abc\n\n\n> a\n> b\n\n")
    assert err.splitlines()[1] == "pagedkv generate: error: prompt 2: the prompt is empty"


def test_every_option_of_the_engine_is_one_here(capsys, tmp_path):
    """Those that are given reach it, and no others: its own defaults hold."""
    wanted = EngineOptions(
        revision="main", device="cuda:1", load_format="dummy", dtype="float16", quantization="fp8",
        kv_cache_dtype="fp8", block_size=8,
        num_blocks=7, gpu_memory_utilization=0.5, enforce_eager=True, swap_space=9, max_num_seqs=3,
        max_num_batched_tokens=17, max_model_len=33, enable_prefix_caching=False, eviction="lru", seed=5,
        speculative_config='{"method": "suffix", "num_speculative_tokens": 2}',
    )  # fmt: skip
    names = [each.name for each in fields(EngineOptions)]
    for command in ("generate", "chat", "serve", "bench"):
        given = engine_options(command_line.parse([command, "MODEL"]))
        assert given == {}
        words = []
        for name in names:
            value, option = getattr(wanted, name), name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{option}")
            elif value is not None:
                words += [f"--{option}", str(value)]
        assert EngineOptions(**engine_options(command_line.parse([command, "MODEL", *words]))) == wanted
        args = command_line.parse([command, "MODEL", "--kv-cache-memory", "123"])
        assert engine_options(args) == {"kv_cache_memory": 123}
        code, out, _ = main(capsys, command, "--help")
        assert code == 0 and all(f"--{name.replace('_', '-')}" in out for name in names)
        assert "starts the generator of seeds" in " ".join(out.split())  # as the docstring says


def test_options_of_sampling():
    words = ["--max-tokens", "3", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--ignore-eos"]
    for command in ("generate", "chat"):
        assert sampling_options(command_line.parse([command, "MODEL"])) == {}
        given = sampling_options(command_line.parse([command, "MODEL", *words]))
        assert given == {"max_tokens": 3, "temperature": 0.5, "stop": ["a", "b"], "ignore_eos": True}
    assert set(OF_A_LINE) <= {each.name for each in fields(pagedkv.SamplingParams)}


@pytest.mark.parametrize("command, absent", [("generate", "max_tokens is 64 where"), ("chat", "max_tokens is what fits where")])
def test_one_default_of_max_tokens(capsys, command, absent):
    _, out, _ = main(capsys, command, "--help")
    sampling = " ".join(out.split("\nsampling:")[1].split("\nengine:")[0].split())
    assert absent in sampling and "not given:" not in sampling
    assert "null in --jsonl: as many as max_model_len and the pool leave" in sampling


def test_packages_that_are_missing_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("pagedkv.optional.find_spec", lambda name: None if name in ("msgspec", "uvicorn") else name)
    code, out, err = main(capsys, "serve", str(tmp_path))
    assert (code, out) == (1, "")
    assert err == "pagedkv serve: error: pagedkv serve needs uvicorn, msgspec, which are not installed: pip install 'pagedkv[serve]'\n"


def test_an_address_that_is_in_use(capsys, tmp_path):
    for package in ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client"):
        pytest.importorskip(package, reason="the extra `serve`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = main(capsys, "serve", str(tmp_path), "--port", str(port))
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert f"--host is '127.0.0.1', --port is {port}: " in err and "in use" in err
    for path, text in ((tmp_path / "none" / "socket", "No such file"), (tmp_path / ("a" * 200), "too long")):
        code, out, err = main(capsys, "serve", str(tmp_path), "--uds", str(path))
        assert (code, out) == (1, "") and f"--uds is {str(path)!r}: " in err and text in err and err.count("\n") == 1


ERRORS = [
    (("serve", "{tmp}", "--lora", "a"), 1, "--lora is 'a' but must be NAME=FOLDER"),
    (("serve", "{tmp}", "--lora", "{tmp}=x"), 1, "is served already"),
    (("serve", "{tmp}", "--ssl-keyfile", "x"), 1, "but --ssl-certfile is not"),
    (("serve", "{tmp}", "--ssl-certfile", "{tmp}/none"), 1, "/none', with the key in"),
    (("serve", "{tmp}", "--api-key-file", "/dev/null"), 1, "--api-key-file is '/dev/null', which has no key"),
    (("serve", "{tmp}", "--max-waiting", "-1"), 1, "--max-waiting is -1 but must be at least 0"),
    (("serve", "{tmp}", "--stuck-after", "0"), 1, "--stuck-after is 0.0 but must be above 0"),
    (("serve", "{tmp}", "--lora", "a={tmp}"), 1, "adapter_config.json"),
    (("serve", "{tmp}", "--api-key", ""), 1, "--api-key is empty"),
    (("serve", "{tmp}", "--max-body-size", "0"), 2, "0 is less than 1"),
    (("serve", "{tmp}", "--port", "70000"), 1, "--port is 70000 but must be in 0..65535"),
    (("serve", "{tmp}", "--port", "-1"), 1, "--port is -1 but must be in 0..65535"),
    (("serve", "{tmp}", "--allowed-origin", "here.example"), 1, "--allowed-origin is 'here.example' but must be"),
    (("serve", "{tmp}", "--allowed-origin", "https://here.example/"), 1, "--allowed-origin is 'https://here.example/' but must be"),
    (("serve", "{tmp}", "--front-ends", "100000"), 1, "--front-ends is 100000 but must be at most 256"),
    (("generate", "{tmp}", "a", "--speculative-config", "[]"), 1, "speculative_config is [] but must be a dict"),
    (("generate", "{tmp}", "a", "--speculative-config", '{"method": "suffix", "num_speculative_tokens": "x"}'), 1, "is 'x' but must be an integer"),
    (("generate", "{tmp}/nowhere", "a"), 1, "nowhere: no such folder"),
    (("generate", "{tmp}", "a" * 256), 1, "256 prompt tokens and"),
    (("generate", "{tmp}", ""), 1, "the prompt is empty"),
    (("generate", "{tmp}", "a", "--temperature", "-1"), 1, "temperature is -1.0"),
    (("generate", "{tmp}", "a", "--dtype", "int3"), 1, "dtype is 'int3'"),
    (("generate", "{tmp}", "a", "--block-size", "0"), 1, "block_size is 0"),
    (("generate", "{tmp}", "a", "--seed", "x"), 2, "invalid int value: 'x'"),
    (("generate", "{tmp}", "a", "--device", "cuda:99"), 1, "CUDA"),
    (("info", "a"), 2, "unrecognized arguments: a"),
    (("generate", "{tmp}"), 1, "no prompt: give one, or --file, --jsonl, or a text on stdin"),
    (("generate", "{tmp}", "--file", "{tmp}/nowhere"), 1, "nowhere"),
    (("generate", "{tmp}", "--file", "{tmp}/model.safetensors"), 1, "is no UTF-8 text"),
    (("generate", "nobody/nothing", "a", "--dtype", "int3"), 1, "dtype is 'int3'"),
    (("chat", "{tmp}", "a"), 1, "no chat template in the model's folder"),
    (("chat", "{tmp}", "a", "--top-p", "2"), 1, "top_p is 2.0"),
    (("generate", "{tmp}", "a", "--top-q", "1"), 2, 'unrecognized arguments: --top-q; texts that begin with "-" go behind "--"'),
    (("generate", "{tmp}", "a", "-b"), 2, "unrecognized arguments: -b"),
    (("generate",), 2, "the following arguments are required: model (see"),
    (("generate", "{tmp}", "a", "--jsonl", "b"), 2, "--jsonl has all prompts: give none beside it"),
    (("generate", "{tmp}", "--jsonl", "b", "--", "-a"), 2, "--jsonl has all prompts: give none beside it"),
    (("chat", "{tmp}", "--file", "a", "--jsonl", "b"), 2, "--jsonl has all messages: give none beside it"),
    (("generate", "{tmp}", "\udcff1"), 2, "'\\udcff1' is no UTF-8 text (invalid start byte at byte 0)"),
    (("generate", "{tmp}", "a", "--stop", "\udcff"), 2, "argument --stop: '\\udcff' is no UTF-8 text"),
    (("demo", "--", "a"), 2, "unrecognized arguments: a"),
    (("demo", "--num-prompts", "0"), 2, "0 is less than 1"),
    (("dance",), 2, "invalid choice: 'dance'"),
]


@pytest.mark.parametrize(("args", "code", "message"), ERRORS)
def test_errors_are_one_line(capsys, monkeypatch, tmp_path, args, code, message):
    write_model(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    result = main(capsys, *(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert result[:2] == (code, "")
    assert message in result[2] and result[2].count("\n") == 1 and "Traceback" not in result[2]


def test_version_and_help_without_a_command(capsys):
    assert main(capsys, "--version") == (0, f"pagedkv {pagedkv.__version__}\n", "")
    code, out, err = main(capsys)
    assert (code, err) == (2, "") and "generate" in out and "--version" in out


@pytest.mark.parametrize("command", [(), ("demo",), ("generate",), ("chat",), ("bench",), ("info",)])
def test_help(capsys, command):
    code, out, err = main(capsys, *command, "--help")
    assert (code, err) == (0, "") and out.startswith("usage: pagedkv")
    assert re.search(r"\n\n\w.{10,}\n(.+\n)*\n", out), "no description"
    assert ("examples:" in out) == (command in (("generate",), ("chat",)))

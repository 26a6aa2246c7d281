"""pagedkv and python -m pagedkv: output, help, and errors of one line."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from checkpoints import save_pretrained, write_model

import pagedkv
from pagedkv import cli


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
    monkeypatch.setattr(cli.demo, "DEMO_MODEL", tmp_path / "gone")
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
    assert "12+34=" in result.stdout and "abc" in result.stdout and result.stderr == ""


@pytest.mark.parametrize(
    ("args", "num_seqs"),
    [(["chat", "one", "two"], 1), (["chat"], 1), (["generate", "one"], 1), (["generate", *"abc"], 3),
     (["generate", *["a"] * 63], 63), (["generate", *["a"] * 64], None), (["generate", *["a"] * 300], None)],
    ids=lambda value: value if value is None or isinstance(value, int) else f"{value[0]}-{len(value) - 1}",
)  # fmt: skip
def test_few_requests_need_few_graphs(capsys, monkeypatch, args, num_seqs):
    """The engine is made for as many as there are; from 64 on its defaults are good."""
    asked = []

    def make(model, **options):
        asked.append((model, options["max_num_seqs"]))
        raise ValueError("made")

    monkeypatch.setattr(pagedkv, "LLM", make)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(capsys, args[0], "folder", *args[1:])[0] == 1
    assert asked == [("folder", num_seqs)]


def test_generate_options(capsys, tmp_path):
    write_model(tmp_path)
    args = ("generate", str(tmp_path), "abc", "--max-tokens", "30", "--temperature", "1")
    first = main(capsys, *args, "--seed", "1")
    assert first[0] == 0 and first[1].startswith("abc")
    assert main(capsys, *args, "--seed", "1", "--block-size", "3") == first
    assert main(capsys, *args, "--seed", "2")[1] != first[1]
    assert main(capsys, "generate", str(tmp_path), "abc", "--max-tokens", "0")[1] == "abc\n"
    assert main(capsys, "generate", str(tmp_path), "--max-tokens", "0", "abc")[1] == "abc\n"  # in any order
    assert main(capsys, "generate", str(tmp_path), "abc", "--max-tokens", "0", "cba", "bac")[1] == "abc\ncba\nbac\n"
    code, out, err = main(capsys, "generate", str(tmp_path), "abc", "", "--max-tokens", "0")
    assert (code, out) == (1, "abc\n") and "the prompt is empty" in err  # the others are not lost


ERRORS = [
    (("generate", "{tmp}/nowhere", "a"), 1, "nowhere: no such folder"),
    (("generate", "{tmp}", "a" * 256), 1, "256 prompt tokens and"),
    (("generate", "{tmp}", ""), 1, "the prompt is empty"),
    (("generate", "{tmp}", "a", "--temperature", "-1"), 1, "temperature is -1.0"),
    (("generate", "{tmp}", "a", "--dtype", "int3"), 1, "dtype is 'int3'"),
    (("generate", "{tmp}", "a", "--block-size", "0"), 2, "0 is less than 1"),
    (("generate", "{tmp}", "a", "--seed", "x"), 2, "invalid int value: 'x'"),
    (("generate", "{tmp}", "a", "--device", "cuda:99"), 1, "CUDA"),
    (("info", "a"), 2, "unrecognized arguments: a"),
    (("generate", "{tmp}"), 1, "no prompt: give one, or --file, --jsonl, or a text on stdin"),
    (("generate", "{tmp}", "--file", "{tmp}/nowhere"), 1, "nowhere"),
    (("generate", "{tmp}", "--file", "{tmp}/model.safetensors"), 1, "is no UTF-8 text"),
    (("generate", "nobody/nothing", "a", "--dtype", "int3"), 1, "dtype is 'int3'"),
    (("chat", "{tmp}", "a"), 1, "no chat template in the model's folder"),
    (("chat", "{tmp}", "a", "--top-p", "2"), 1, "top_p is 2.0"),
    (("generate", "{tmp}", "a", "--top-q", "1"), 2, "unrecognized arguments: --top-q 1"),
    (("demo", "--num-prompts", "0"), 2, "0 is less than 1"),
    (("dance",), 2, "invalid choice: 'dance'"),
    ((), 2, "required"),
]


@pytest.mark.parametrize(("args", "code", "message"), ERRORS)
def test_errors_are_one_line(capsys, monkeypatch, tmp_path, args, code, message):
    write_model(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    result = main(capsys, *(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert result[:2] == (code, "")
    assert message in result[2] and result[2].count("\n") == 1 and "Traceback" not in result[2]


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "bench"])
def test_the_device_is_auto_unless_given(command):
    parser, model = cli._parser(), ["MODEL"] if command != "demo" else []
    assert parser.parse_args([command, *model]).device == "auto"
    assert parser.parse_args([command, *model, "--device", "cuda:1"]).device == "cuda:1"


@pytest.mark.parametrize("command", [(), ("demo",), ("generate",), ("chat",), ("bench",), ("info",)])
def test_help(capsys, command):
    code, out, err = main(capsys, *command, "--help")
    assert (code, err) == (0, "") and out.startswith("usage: pagedkv")
    assert ("examples:" in out) == (command in (("generate",), ("chat",)))

"""pagedkv chat and generate: stdin, files, JSON lines, a conversation in a terminal, Ctrl-C. Real processes."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import write_model

import pagedkv

DEMO_MODEL = Path(pagedkv.__file__).parent / "data" / "demo_model"
PAGEDKV = [sys.executable, "-m", "pagedkv"]


@pytest.fixture(scope="module")
def adds(tmp_path_factory):
    """The model that adds, with a template: the last message and "="."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}=")
    (folder / "all.jinja").write_text("{{ messages | map(attribute='content') | join }}=")
    return str(folder)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """A random model that goes on for ever."""
    folder = write_model(tmp_path_factory.mktemp("talks"), max_position_embeddings=100_000)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")
    return str(folder)


def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
    done = subprocess.run([*PAGEDKV, *args], input=stdin, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_texts_from_everywhere(adds, tmp_path):
    (tmp_path / "sum").write_text("40+2=")
    assert run("generate", adds, "1+1=", "--file", str(tmp_path / "sum")) == (0, "> 1+1=\n2\n\n> 40+2=\n42\n", "")
    assert run("generate", adds, stdin="12+34=") == (0, "> 12+34=\n46\n", "")
    assert run("generate", adds, "-", "1+1=", stdin="12+34=") == (0, "> 12+34=\n46\n\n> 1+1=\n2\n", "")
    assert run("chat", adds, "1+1", "12+34") == (0, "2\n46\n", "")
    assert run("chat", adds, stdin="40+2") == (0, "42\n", "")
    assert run("chat", adds, "--stop", "4", stdin="40+2") == (0, "\n", "")


def test_json_lines(adds):
    lines = [{"prompt": "12+34="}, {"prompt": "1+1=", "max_tokens": 1}, "{", [], {"prompt": 3}, {"prompt": "1+1=", "top_q": 1},
             {"prompt": "1+1=", "temperature": -1}, {"prompt": ""}, {"prompt": "5+5="}]  # fmt: skip
    text = "\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    code, out, err = run("generate", adds, "--jsonl", "-", stdin=text)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(rows)) == (1, "", 9)
    assert rows[0] == {"prompt": "12+34=", "text": "46", "num_tokens": 3, "finish_reason": "stop"}
    assert rows[1]["finish_reason"] == "length" and rows[8]["text"] == "10"
    errors = ["line 5: no JSON", "line 7: no JSON object", "prompt is 3", "no option 'top_q'", "temperature is -1", "the prompt is empty"]
    assert all(message in row["error"] for message, row in zip(errors, rows[2:8], strict=True))


def test_half_a_surrogate_pair_stops_nothing(adds):
    lines = [{"prompt": "1+1="}, {"prompt": "\ud800"}, {"prompt": "5+5="}]
    code, out, err = run("generate", adds, "--jsonl", "-", stdin="\n".join(map(json.dumps, lines)))
    rows = [json.loads(line) for line in out.splitlines()]
    assert err == "" and [row["prompt"] for row in rows] == ["1+1=", "\ud800", "5+5="]
    assert (rows[0]["text"], rows[2]["text"]) == ("2", "10") and "error" in rows[1] and code == 1


def test_separators_of_unicode_end_no_line(adds):
    text = json.dumps({"prompt": "1+1=\u2028\u2029\x85"}, ensure_ascii=False) + "\r\n" + json.dumps({"prompt": "5+5="})
    code, out, err = run("generate", adds, "--jsonl", "-", stdin=text)
    assert (code, err) == (0, "")
    assert [json.loads(line)["prompt"] for line in out.split("\n")[:2]] == ["1+1=\u2028\u2029\x85", "5+5="]


def test_json_lines_of_chats(adds, tmp_path):
    chats = [{"messages": [{"role": "user", "content": "12+34"}]}, {"messages": "x"}, {"messages": [{"content": "1+1"}]},
             {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 0},
             {"messages": [1, 2, 3]}, {"messages": []}]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, chats)))
    code, out, err = run("chat", adds, "--jsonl", str(path))
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (1, "") and rows[0] == {"text": "46", "num_tokens": 3, "finish_reason": "stop"}
    assert "messages is 'x'" in rows[1]["error"] and "role is None" in rows[2]["error"]
    assert rows[3] == {"text": "", "num_tokens": 0, "finish_reason": "length"}
    assert "messages[0] is 1 but must be a dict" in rows[4]["error"] and "messages is empty" in rows[5]["error"]


def test_a_template_and_a_system_message(adds, tmp_path):
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}+{{ messages[1].content }}=")
    assert run("chat", adds, "2", "--system", "40", "--chat-template", str(template)) == (0, "42\n", "")
    template.write_text("{{ ''.__class__ }}")
    code, _, err = run("chat", adds, "2", "--chat-template", str(template))
    assert code == 1 and "the chat template failed: SecurityError" in err and err.count("\n") == 1


def test_whoever_reads_may_stop(adds):
    process = subprocess.Popen([*PAGEDKV, "generate", adds, "1+1="], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(120) == 1 and "Traceback" not in process.stderr.read()


# --- bytes of other encodings, closed streams, interrupts


def run_bytes(*args: str | bytes, stdin: bytes = b"", **env: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run([*PAGEDKV, *args], input=stdin, capture_output=True, timeout=120, check=False, env=os.environ | env)
    return done.returncode, done.stdout, done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("env", [{}, ASCII], ids=["", "ascii"])
def test_what_is_no_utf8_is_an_error_of_one_line(adds, tmp_path, command, env):
    (tmp_path / "text").write_bytes(b"12\xe4")
    for args, stdin, message in (
        ((), b"\xff\xfe abc", b"stdin: is no UTF-8 text (invalid start byte at byte 0)"),
        (("-",), b"1+1=\x80", b"stdin: is no UTF-8 text (invalid start byte at byte 4)"),
        (("--jsonl", "-"), b"\xff", b"stdin: is no UTF-8 text"),
        (("--file", str(tmp_path / "text")), b"", b"text: is no UTF-8 text (unexpected end of data at byte 2)"),
        ((b"1+1=\xff",), b"", b"is no UTF-8 text (invalid start byte at byte 4)"),
    ):
        code, out, err = run_bytes(command, adds, *args, stdin=stdin, **env)
        assert code in (1, 2) and out == b"" and message in err and err.count(b"\n") == 1, err


def test_utf8_in_a_terminal_of_ascii(adds, tmp_path):
    """What comes in is UTF-8 all the same; what goes out is escaped."""
    (tmp_path / "template").write_text("{{ messages[0].content | length }}+{{ messages[1].content | length }}=")
    args = ("chat", adds, "--chat-template", str(tmp_path / "template"), "--system", "é" * 12, "ü€" * 17)
    assert run_bytes(*args, **ASCII) == (0, b"46\n", b"")
    code, out, err = run_bytes("generate", adds, "€1+1=", "--max-tokens", "0", **ASCII)
    assert (code, out, err[-15:]) == (0, b"> \\u20ac1+1=\n\n", b"(--max-tokens)\n")
    line = {"prompt": "é€😀1+1=", "max_tokens": 0}
    code, out, err = run_bytes("generate", adds, "--jsonl", "-", stdin=json.dumps(line, ensure_ascii=False).encode(), **ASCII)
    assert (code, err) == (0, b"") and json.loads(out)["prompt"] == line["prompt"]
    assert run_bytes("generate", adds, stdin=b"\xef\xbb\xbf1+1=") == (0, b"> 1+1=\n2\n", b"")  # a mark of Windows


def shell(line: str) -> tuple[int, str, str]:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_closed_streams(adds):
    command = f"{sys.executable} -m pagedkv"
    for name, words in (("generate", ""), ("chat", ""), ("generate", "-"), ("chat", "-"), ("generate", "--jsonl -")):
        code, out, err = shell(f"{command} {name} {adds} {words} <&-")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert ("stdin is closed" if "-" in words else "give one, or --file, --jsonl, or a text on stdin") in err
    assert shell(f"{command} generate {adds} 1+1= <&-") == (0, "> 1+1=\n2\n", "")
    assert shell(f"{command} generate {adds} 1+1= --max-tokens 1 2>&-") == (0, "> 1+1=\n2\n", "")
    assert shell(f"{command} generate {adds} '' 2>&-") == (1, "", "")
    assert shell(f"{command} demo --num-prompts 1 >&- 2>&-")[0] == 0


@pytest.mark.parametrize("module", ["pagedkv.cli.command_line", "argparse", "pagedkv.engine.options", "numpy", "tokenizers"])
def test_ctrl_c_during_imports(adds, module):
    code = f"""
import sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from pagedkv.cli import main
sys.exit(main(["generate", {adds!r}, "1+1="]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# --- answers that fail or are cut


@pytest.fixture(scope="module")
def fails(adds, tmp_path_factory):
    """The model that adds, with NaN for every weight."""
    folder = shutil.copytree(adds, tmp_path_factory.mktemp("fails") / "model")
    path = folder / "model.safetensors"
    weights = path.read_bytes()
    start = 8 + int.from_bytes(weights[:8], "little")
    path.write_bytes(weights[:start] + b"\xc0\x7f" * ((len(weights) - start) // 2))
    return str(folder)


def test_nan_is_an_error_of_one_line(fails):
    assert run("generate", fails, "1+1=", "2+2=")[:2] == (1, "")
    for args in (("generate", fails, "1+1="), ("chat", fails, "1+1")):
        code, _, err = run(*args)
        assert code == 1 and err.startswith(f"pagedkv {args[0]}: error: the logits hold NaN") and err.count("\n") == 1
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("1+1", "2+2")]
    code, out, err = run("chat", fails, "--jsonl", "-", stdin="\n".join(map(json.dumps, chats)))
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(rows)) == (1, "", 2) and all("NaN" in row["error"] for row in rows)


def test_a_note_where_an_answer_was_cut(adds):
    assert run("generate", adds, "12+34=", "--max-tokens", "1") == (
        0, "> 12+34=\n4\n", "pagedkv generate: the answer was cut after 1 token (--max-tokens)\n")  # fmt: skip
    _, out, err = run("generate", adds, "12+34=", "1+1=", "--max-tokens", "2")
    assert out == "> 12+34=\n46\n\n> 1+1=\n2\n"
    assert err == "pagedkv generate: prompt 1: the answer was cut after 2 tokens (--max-tokens)\n"
    assert run("chat", adds, "12+34", "--max-tokens", "1")[1:] == (
        "4\n",
        "pagedkv chat: the answer was cut after 1 token (--max-tokens)\n",
    )
    ignoring = ("chat", adds, "1+1", "--ignore-eos", "--max-model-len", "12")
    assert run(*ignoring)[2] == "pagedkv chat: the answer was cut after 8 tokens: prompt and answer fill the 12 of max_model_len\n"
    assert "the pool of pages (--num-blocks)" in run(*ignoring[:4], "--num-blocks", "1", "--block-size", "8")[2]


def test_the_models_own_settings(talks, tmp_path):
    """generation_config.json holds; the command line and the line of a file go before it."""
    folder = shutil.copytree(talks, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 7}')
    answers = {run("generate", str(folder), "abc", "--seed", str(seed))[1] for seed in range(2)}
    assert len(answers) == 1
    assert "after 7 tokens" in run("chat", str(folder), "abc", "--ignore-eos")[2]
    assert "after 5 tokens" in run("chat", str(folder), "abc", "--ignore-eos", "--max-tokens", "5")[2]
    answers = {run("generate", str(folder), "abc", "--seed", str(seed), "--temperature", "1", "--max-tokens", "20")[1] for seed in range(2)}
    assert len(answers) == 2


def test_thinking(adds, tmp_path):
    template = "{{ messages[0].content }}+{% if enable_thinking is not defined %}1{% elif enable_thinking %}2{% else %}3{% endif %}="
    (tmp_path / "template").write_text(template)
    args = ("chat", adds, "40", "--chat-template", str(tmp_path / "template"))
    assert [run(*args, *words)[1] for words in ((), ("--thinking",), ("--no-thinking",))] == ["41\n", "42\n", "43\n"]
    code, _, err = run("chat", adds, "1+1", "--no-thinking")
    assert code == 1 and "has no such switch" in err and err.count("\n") == 1


def test_a_model_without_a_template(adds, tmp_path):
    folder = shutil.copytree(adds, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").unlink()  # it is not loaded for this
    assert run("chat", str(folder), "1+1") == (
        1, "", f"pagedkv chat: error: {folder}: no chat template in the model's folder: --chat-template FILE gives one\n")  # fmt: skip


# --- a terminal


class Terminal:
    """A conversation with `pagedkv chat` on a pseudo-terminal."""

    def __init__(self, *args: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(PAGEDKV[0], [*PAGEDKV, "chat", *args])

    def read_until(self, text: str) -> str:
        seen, deadline = "", time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline, seen
            try:
                seen += os.read(self.file, 4096).decode()
            except OSError:  # the other end is closed
                raise AssertionError(f"it ended: {seen}") from None
        return seen

    def say(self, text: str) -> None:
        os.write(self.file, text.encode())

    def end(self, key: str = "") -> int:
        """The exit code. The key is pressed again and again: readline may miss a signal just as it begins to wait."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.file)
                return os.waitstatus_to_exitcode(status)
            try:
                if select.select([self.file], [], [], 0.3)[0]:
                    os.read(self.file, 4096)
                else:
                    self.say(key)
            except OSError:  # the other end is closed
                time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it goes on")


def test_a_conversation(adds):
    terminal = Terminal(adds)
    terminal.read_until("> ")
    terminal.say("12+34\n")
    assert "46" in terminal.read_until("\r\n> ")
    terminal.say("/help\n")
    assert "/reset forgets" in terminal.read_until("\r\n> ")
    terminal.say("/reset\n")
    terminal.read_until("> ")
    terminal.say("5+5\n")
    assert "10" in terminal.read_until("\r\n> ")
    terminal.say("/quit\n")
    assert terminal.end() == 0


def test_a_conversation_that_is_too_long(adds):
    terminal = Terminal(adds, "--max-model-len", "10", "--chat-template", adds + "/all.jinja")
    terminal.read_until("> ")
    terminal.say("1+1+1+1+1+1\n")
    assert "exceed max_model_len=10; a shorter message may fit" in terminal.read_until("\r\n> ")
    terminal.say("1+1\n")
    assert "2" in terminal.read_until("\r\n> ")
    terminal.say("1+1+1+1\n")
    assert "exceed max_model_len=10; /reset forgets what was said" in terminal.read_until("\r\n> ")
    terminal.say("/reset\n")
    terminal.read_until("> ")
    terminal.say("5+4\n")
    assert "9" in terminal.read_until("\r\n> ")
    assert terminal.end("\x04") == 0


def test_ctrl_c_ends_an_answer_and_then_the_conversation(talks):
    terminal = Terminal(talks, "--max-tokens", "90000", "--ignore-eos")
    terminal.read_until("> ")
    terminal.say("abc\n")
    terminal.read_until("abc\r\n")
    time.sleep(0.5)
    terminal.say("\x03")
    terminal.read_until("\r\n> ")
    assert terminal.end("\x03") == 130


def test_ctrl_c_while_an_answer_is_piped(talks):
    process = subprocess.Popen([*PAGEDKV, "chat", talks, "abc", "--max-tokens", "90000", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""

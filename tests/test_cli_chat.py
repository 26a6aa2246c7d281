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
    assert run("generate", adds, "1+1=", "--file", str(tmp_path / "sum")) == (0, "1+1=2\n40+2=42\n", "")
    assert run("generate", adds, stdin="12+34=") == (0, "12+34=46\n", "")
    assert run("generate", adds, "-", "1+1=", stdin="12+34=") == (0, "12+34=46\n1+1=2\n", "")
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

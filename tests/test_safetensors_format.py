"""Safetensors files that are damaged, and all that the format allows and forbids, beside its reference."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import safetensors_bytes

from pagedkv.models.files import CheckpointError
from pagedkv.models.safetensors import SafetensorsFile


def corrupt_header(data: bytes, change) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


BAD_FILES = {
    "empty": (lambda data: b"", "empty file"),
    "short": (lambda data: data[:5], r"truncated, or no safetensors file \(5 bytes\)"),
    "header cut": (lambda data: data[:100], r"truncated, or no safetensors file \(100 bytes\)"),
    "data cut": (lambda data: data[:-1], r"tensor 'a' ends at byte \d+ but the file is truncated at \d+"),
    "huge header": (lambda data: b"\xff" * 8 + data[8:], "truncated, or no safetensors file"),
    "no JSON": (lambda data: (4).to_bytes(8, "little") + b"{]{]" + data, "the header is no JSON"),
    "no object": (lambda data: (4).to_bytes(8, "little") + b"[1] " + data, "the header is no JSON object"),
    "nested": (lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000, "the header is no JSON"),
    "dtype": (lambda data: corrupt_header(data, lambda h: h["a"].update(dtype=["F32"])), "tensor 'a': bad header"),
    "no dtype": (lambda data: corrupt_header(data, lambda h: h["a"].pop("dtype")), "tensor 'a': bad header"),
    "text as shape": (lambda data: corrupt_header(data, lambda h: h["a"].update(shape="66")), "tensor 'a': bad header"),
    "negative": (lambda data: corrupt_header(data, lambda h: h["a"].update(shape=[-1, -6])), "tensor 'a': bad header"),
    "offsets": (
        lambda data: corrupt_header(data, lambda h: h["a"].update(data_offsets=[0, 20])),
        r"tensor 'a': offsets 0..20 do not fit F32 \[6\]",
    ),
    "offsets below": (
        lambda data: corrupt_header(data, lambda h: h["a"].update(data_offsets=[-24, 0])),
        "tensor 'a': bad header entry",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path, case):
    change, message = BAD_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(change(safetensors_bytes({"a": np.arange(6, dtype=np.float32)})))
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{message}|model.safetensors: {message}"):
        SafetensorsFile(path).tensor("a")


@pytest.mark.parametrize("offsets", [[0, 24], [20, 44], [12, 36]])
def test_tensors_that_share_bytes(tmp_path, offsets):
    path = tmp_path / "model.safetensors"
    a, b = np.arange(12, dtype=np.float32).reshape(2, 6)
    data = safetensors_bytes({"a": a, "b": b, "none": np.zeros((0, 3), np.float32)})
    path.write_bytes(data)
    assert SafetensorsFile(path).tensor("b").tolist() == list(range(6, 12))
    path.write_bytes(corrupt_header(data, lambda h: h["b"].update(data_offsets=offsets)))
    with pytest.raises(CheckpointError, match="model.safetensors: tensors 'a' and 'b' share byte"):
        SafetensorsFile(path)


# --- what the format allows, beside its reference

A = '"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}'
B = '"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[24,36]}'


def empty(name: str, at: int) -> str:
    return f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[{at},{at}]}}'


def table(*entries: str) -> str:
    return "{" + ",".join(entries) + "}"


def in_file(header: str | bytes, num_bytes: int = 36, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else header.encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(num_bytes)


def one(old: str, new: str) -> bytes:
    """The only tensor's entry with a change."""
    assert old in A
    return in_file(table(A.replace(old, new)), 24)


ALLOWED = {
    "two": in_file(table(A, B)),
    "the other order": in_file(table(B, A)),
    "padded": in_file(table(A, B) + "  \n"),
    "none": in_file("{}", 0),
    "metadata": in_file(table('"__metadata__":{"format":"pt"}', A, B)),
    "no metadata": in_file(table('"__metadata__":null', A, B)),
    "another field": one('"shape"', '"x":[1.5,{}],"shape"'),
    "empty tensors": in_file(table(empty("x", 24), A, empty("y", 0)), 24),
    "4 bits": one('"F32","shape":[6]', '"F4","shape":[48]'),
    "no dimension": in_file('{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', 4),
}
FORBIDDEN = {
    "the length one too small": (in_file(table(A, B) + " ", length=len(A) + len(B) + 3), "bytes 36..37 .* after"),
    "bytes after the last": (in_file(table(A, B), 40), r"bytes 36\.\.40 of the data, after the last tensor, are no"),
    "bytes and no tensor": (in_file("{}", 1), r"bytes 0\.\.1 of the data, after the last tensor"),
    "bytes before the first": (in_file(table(B)), r"bytes 0\.\.24 of the data, before tensor 'b', are no tensor's"),
    "a gap": (in_file(table(A, B).replace("24,36", "28,40"), 40), r"bytes 24\.\.28 of the data, before tensor 'b'"),
    "one byte short": (in_file(table(A, B), 35), r"tensor 'b' ends at byte \d+ but the file is truncated at \d+"),
    "empty inside": (in_file(table(A, empty("x", 12)), 24), "tensors 'a' and 'x' share byte 12"),
    "empty after a gap": (in_file(table(A, empty("x", 28)), 28), r"bytes 24\.\.28 .* before tensor 'x'"),
    "backwards": (one("[0,24]", "[24,0]"), r"offsets 24\.\.0 do not fit"),
    "huge header": (in_file(b"{}" + b" " * 99_999_999, 0), "the header has 100000001 bytes but may have 100000000"),
    "no header": (in_file("", 0), "the header is no JSON"),
    "mark": (in_file("\ufeff" + table(A), 24), "the header is no JSON"),
    "UTF-16": (in_file(table(A).encode("utf-16"), 24), "the header is no JSON"),
    "NaN": (one('"shape"', '"x":NaN,"shape"'), "the header is no JSON"),
    "infinite": (one('"shape"', '"x":1e999,"shape"'), "the header is no JSON"),
    "0 byte": (in_file(table(A) + "\0", 24), "the header is no JSON"),
    "a field twice": (one('"shape":[6]', '"shape":[6],"shape":[6]'), "a name is there twice"),
    "metadata of ints": (in_file(table('"__metadata__":{"x":1}', A), 24), "__metadata__ must map names to texts"),
    "metadata as a list": (in_file(table('"__metadata__":[]', A), 24), "__metadata__ must map names to texts"),
    "null": (in_file(table('"b":null', A), 24), "tensor 'b': bad header entry None"),
    "a float": (one("[6]", "[6.0]"), "tensor 'a': bad header entry"),
    "minus 0": (one("[0,", "[-0,"), "tensor 'a': bad header entry"),
    "a bool": (one("[6]", "[6,true]"), "tensor 'a': bad header entry"),
    "above 64 bits": (one("[6]", "[6,0,18446744073709551616]"), "tensor 'a': bad header entry"),
    "overflow": (in_file(table(empty("a", 0).replace("[0]", "[9223372036854775808,4,0]")), 0), "do not fit"),
    "three offsets": (one("[0,24]", "[0,24,24]"), "tensor 'a': bad header entry"),
    "no such dtype": (one("F32", "F33"), "tensor 'a': the format has no dtype 'F33'"),
    "half a byte": (one('"F32","shape":[6]', '"F4","shape":[47]'), r"offsets 0\.\.24 do not fit F4 \[47\]"),
}
# The format's text forbids these; its reference takes them.
TOLERATED = {
    "a tensor twice": (in_file(table(A, A), 24), "a name is there twice"),
    "a space first": (in_file(" " + table(A), 24), "the header is no JSON object"),
    "a list as an entry": (in_file('{"a":["F32",[6],[0,24]]}', 24), "tensor 'a': bad header entry"),
}


def reads(path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        SafetensorsFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return False
    return True


def reference_reads(data: bytes) -> bool:
    safetensors = pytest.importorskip("safetensors")
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("case", ALLOWED)
def test_the_format_allows(tmp_path, case):
    assert reads(tmp_path / "x.safetensors", ALLOWED[case])
    assert reference_reads(ALLOWED[case])


@pytest.mark.parametrize("case", FORBIDDEN | TOLERATED)
def test_the_format_forbids(tmp_path, case):
    data, message = (FORBIDDEN | TOLERATED)[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"x.safetensors: .*{message}|x.safetensors: {message}"):
        SafetensorsFile(tmp_path / "x.safetensors")
    assert reference_reads(data) == (case in TOLERATED)


def test_damaged_files_beside_the_reference(tmp_path, rng):
    """One to three bytes of a header or its length are changed, added or lost: both read it, or neither."""
    start = ALLOWED["metadata"]
    length = int.from_bytes(start[:8], "little")
    digits = [i for i in range(length + 8) if start[i : i + 1].isdigit() or i == 0]
    num_read = 0
    for _ in range(4000):
        data = bytearray(start)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.choice(digits)) if rng.random() < 0.7 else int(rng.integers(9, length + 8))
            change, byte = rng.integers(4), int(rng.choice(bytearray(b'0123456789 ,:"{}[]-.eF')))
            if at == 0:
                data[0] = (data[0] + int(rng.integers(-3, 4))) % 256
            elif change == 0:
                data[at:at] = bytes([byte])
            elif change == 1:
                del data[at]
            else:
                data[at] = byte
            if change < 2 and rng.random() < 0.9 and at:
                data[0] = (data[0] + (1 if change == 0 else -1)) % 256
        expected = reference_reads(bytes(data))
        num_read += expected
        assert reads(tmp_path / "x.safetensors", bytes(data)) == expected, bytes(data)
    assert num_read > 20

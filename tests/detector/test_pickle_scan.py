from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest

from detector import pickle_scan
from detector.pickle_scan import DamagedPickleError, check_pickle, check_pickle_file

CONTENT = {
    "text": "é" * 70,
    "long text": "x" * 5000,
    "bytes": b"\x00" * 300,
    "numbers": [0, -1, 255, 70_000, 2**31, -(2**62), 2**100, 1.5, True, None],
    "nested": {"a": [{"b": (1, (2, "x"))}, ()], 7: [[], {}]},
    "named twice": [["a"]] * 3,
    ("a", 1): "a flat tuple as key",
    "array": np.arange(5, dtype=np.float32),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_pickle_writes_is_accepted_and_its_end_is_found(protocol: int):
    data = pickle.dumps(CONTENT, protocol)
    assert check_pickle(data) == len(data)
    assert check_pickle(b"before" + data + b"behind", len(b"before")) == len(b"before") + len(data)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_many_records_are_accepted(protocol: int):
    records = [{"id": n, "words": [f"word{n}", "a"], "text": "ab" * (n % 60)} for n in range(3000)]
    data = pickle.dumps(records, protocol)
    assert check_pickle(data) == len(data)


def test_a_cut_off_pickle_is_refused_wherever_it_ends():
    data = pickle.dumps(CONTENT, 4)
    for end in range(len(data)):
        with pytest.raises(DamagedPickleError):
            check_pickle(data[:end])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.", "claims a frame of 1099511627776 bytes"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"N.", "claims a string of 1099511627776 bytes"),
        (b"\x8b" + struct.pack("<i", 300) + b"1" * 300 + b".", "an integer of 300 bytes"),
        (b"I" + b"1" * 400 + b"\n.", "a number of 401 digits"),
        (b"]r\xff\xff\xff\x7f.", "uses place 2147483647 of the memo"),
        (b"]p99999999\n.", "uses place 99999999 of the memo"),
        (b"N2\x86.", "it has DUP"),
        (b"\x8f.", "it has a set"),
        (b"\x82\x01.", "it has an extension code"),
        (b"\xff.", "byte 0 is no opcode"),
        (b"}N\x85\x85Ns.", "tuple of tuples"),
        (b"}(N\x85\x85Nu.", "tuple of tuples"),
        (b"(N\x85\x85Nd.", "tuple of tuples"),
        (b"N\x85q\x000}h\x00h\x00\x86Ns.", "tuple of tuples"),
    ],
)
def test_claims_are_refused(data: bytes, reason: str):
    with pytest.raises(DamagedPickleError, match=reason):
        check_pickle(data)


@pytest.mark.parametrize("key", [b"X" + struct.pack("<I", 5000) + b"x" * 5000, b"\x8a\x09" + b"1" * 9])
def test_long_keys_are_refused_where_tuples_are(key: bytes):
    """Without tuples nothing is looked at but lengths, which is quicker."""
    with pytest.raises(DamagedPickleError, match="very long string or number"):
        check_pickle(b"N\x850}" + key + b"Ns.")


def test_content_that_would_fill_the_memory(monkeypatch):
    monkeypatch.setattr(pickle_scan, "SMALL_CONTENT", 10_000)
    check_pickle(pickle.dumps([[n, "text"] for n in range(1000)]))
    for content in (b"](" + b"]" * 5000 + b"e.", b"](" + b"}" * 5000 + b"e.", b"](" + b"(d" * 5000 + b"e."):
        with pytest.raises(DamagedPickleError, match="far more memory than the file"):
            check_pickle(content)


def test_the_number_of_tuples_is_limited(monkeypatch):
    monkeypatch.setattr(pickle_scan, "MOST_TUPLES", 10)
    check_pickle(pickle.dumps([(n, n) for n in range(10)]))
    with pytest.raises(DamagedPickleError, match="it has 11 tuples"):
        check_pickle(pickle.dumps([(n, n) for n in range(11)]))


def test_files(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(CONTENT))
    check_pickle_file(path)
    path.write_bytes(b"")
    with pytest.raises(DamagedPickleError, match="it is empty"):
        check_pickle_file(path)

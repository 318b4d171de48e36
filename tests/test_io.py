"""File names, logs, checksums, and the files that a command may overwrite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from urllib.parse import unquote

import pytest

from detector.io import atomic_folder, decode_json
from e2e_vl.io import (
    Id,
    RunLog,
    box_corners,
    check_output,
    file_name,
    find_checksum_mismatch,
    read_log,
    read_text,
    replace_nan,
    write_checksums,
)
from tests.data.helpers import refused


@pytest.mark.parametrize(
    "text", ["12", "a b", "train2014+val2014", "../../x", "日本/1", "a\0b", "C:\\x", "a%2Fb", "*?|"]
)
def test_every_id_is_one_harmless_name_and_comes_back(text: str):
    name = file_name(text)
    assert unquote(name) == text
    assert not set(name) & set('<>:"|?*\\/\0')
    assert name == text or not text.replace("+", "").replace(" ", "").isalnum()


def test_boxes_become_corners():
    assert box_corners((1, 2, 3, 4), "x") == (1, 2, 4, 6)
    for box in ((1, 2, 0, 4), (1, 2, 3, -1), (1e9, 0, 1e-9, 1)):  # the last width is lost beside x
        with refused("refs.json, box 3"):
            box_corners(box, "refs.json, box 3")


def test_text_files(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"gr\xf6\xdfer")
    with refused("a.txt: not UTF-8"):
        read_text(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        read_text(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1", 1),
        ('"1"', "1"),
        ("1.0", 1),
        (str(2**63 - 1), 2**63 - 1),
        (str(2**63), str(2**63)),
        (f"-{2**70}", f"-{2**70}"),
    ],
)
def test_ids_are_integers_of_64_bits_or_strings(written: str, read: int | str):
    assert decode_json(written, "a.json", Id) == read


def test_other_numbers_are_no_ids():
    for written in ("1.5", "1e17", "true", "null"):  # above 2^53, floats stand for several integers
        with refused("a.json"):
            decode_json(written, "a.json", Id)


def test_a_log_names_what_was_not_finite_and_loses_a_line_that_was_cut_off(tmp_path: Path):
    assert replace_nan({"a": math.nan, "b": 1.0, "c": "x"}) == {"a": None, "b": 1.0, "c": "x", "not_finite": ["a"]}
    assert replace_nan({"b": 1.0}) == {"b": 1.0}
    path = tmp_path / "log.jsonl"
    assert read_log(path) == []
    RunLog(path, enabled=True).write(3, "eval", {"val/loss": math.inf})
    with path.open("a") as file:
        file.write('{"step": 4, "ki')
    assert read_log(path) == [{"step": 3, "kind": "eval", "val/loss": None, "not_finite": ["val/loss"]}]
    path.write_text("{}\nloss\n")
    with refused("log.jsonl, line 2"):
        read_log(path)


def test_a_resumed_log_drops_what_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = RunLog(tmp_path / "log.jsonl", enabled=True)
    for step, kind in ((1, "train"), (2, "train"), (2, "eval"), (3, "train")):
        log.write(step, kind, {})
    RunLog(tmp_path / "log.jsonl", enabled=True, resume_step=2, logged_step=2)
    assert not caplog.messages
    RunLog(tmp_path / "log.jsonl", enabled=True, resume_step=5, logged_step=4)
    assert "from step 3 to step 4 have been lost" in caplog.text
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1, "kind": "train"}, {"step": 2, "kind": "train"}]
    RunLog(tmp_path / "log.jsonl", enabled=False)
    assert len(read_log(tmp_path / "log.jsonl")) == 2


def test_every_kind_of_damage_is_found(tmp_path: Path):
    folder = tmp_path / "made"
    with atomic_folder(folder) as part:
        (part / "deep").mkdir()
        (part / "deep" / "a.bin").write_bytes(bytes(range(256)))
        (part / "b.txt").write_text("b")
        write_checksums(part)
    (folder / "later.txt").write_text("not of the checkpoint")
    assert find_checksum_mismatch(folder) is None
    path = folder / "deep" / "a.bin"
    whole = path.read_bytes()
    for damaged in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-1]):
        path.write_bytes(damaged)
        assert find_checksum_mismatch(folder) == "deep/a.bin has changed since it was written"
    path.unlink()
    assert find_checksum_mismatch(folder) == "deep/a.bin is missing"
    (folder / "checksums.json").write_text(json.dumps([1]))
    assert find_checksum_mismatch(folder) == "its checksums.json is missing or damaged"


@pytest.mark.parametrize("part", ["metrics.json", "log.jsonl", "model/config.yaml", "encoder/model.safetensors"])
def test_existing_files_of_a_run_are_not_replaced(tmp_path: Path, part: str):
    run = tmp_path / "run"
    for name in ("config.yaml", part, "below/a.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("")
    for name in (part, "config.yaml", "below/a.json", "below/../config.yaml"):
        with refused(str(run)):
            check_output(run / name)
        check_output(run / name, may_replace=True)
    check_output(run / "new" / "a.json")
    (tmp_path / "own.json").write_text("")  # beside the run
    check_output(tmp_path / "own.json")
    with refused(str(tmp_path)):
        check_output(tmp_path)

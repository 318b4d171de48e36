"""Which files a command may write, and logs that nobody trusts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.io import check_output, read_log, read_metrics, read_settings_text


@pytest.mark.parametrize("part", ["metrics.json", "log.jsonl", "model/config.yaml", "encoder/model.safetensors"])
def test_existing_files_of_a_run_are_refused(tmp_path: Path, part: str):
    run = tmp_path / "run"
    for name in ("config.yaml", part, "below/a.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("")
    for name in (part, "config.yaml", "below/a.json", "below/../config.yaml"):
        with pytest.raises(ValueError, match=f"belongs to the run {run} and is not replaced"):
            check_output(run / name)
        check_output(run / name, may_replace=True)
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(ValueError, match="belongs to the run"):
        check_output(tmp_path / "link" / "config.yaml")
    check_output(run / "new" / "a.json")
    (tmp_path / "own.json").write_text("")  # beside the run
    check_output(tmp_path / "own.json")


def test_a_folder_with_settings_alone_is_no_run(tmp_path: Path):
    for name in ("config.yaml", "a.json"):
        (tmp_path / name).write_text("")
    check_output(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "kind": "train", "loss": NaN}', "line 2 holds NaN, which is not JSON"),
        ("[" * 100_000, "line 2: its lists and objects are more than 50 deep"),
        ('{"step": 1' + "0" * 400 + "}", "line 2: a whole number has more than 128 bits"),
        ("[]", "line 2 is not an object with a step and a kind"),
        ('{"step": "x", "kind": "train"}', "line 2 is not an object with a step and a kind"),
        ('{"kind": "train"}', "line 2 is not an object with a step and a kind"),
        ("", "line 2 is not JSON"),
        ('{"step": -5, "kind": "train"}', "line 2: step is -5, expected a whole number from 0 on"),
        ('{"step": 1, "kind": "train", "loss": "x"}', "line 2: value.loss is 'x', expected a number or null"),
        ('{"step": 1, "kind": "train", "loss": [1]}', "line 2: value.loss is [1], expected a number or null"),
        ('{"step": 1, "kind": "train", "loss": 1e308}', "line 2: value.loss is 1e+308, expected a number up to 1e+300"),
        ('{"step": 1, "kind": "train", "not_finite": 3}', "line 2: not_finite is 3, expected a list"),
    ],
)
def test_a_hostile_log_is_one_sentence(tmp_path: Path, line: str, message: str):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 0, "kind": "train"}}\n{line}\n{{"step"')
    with pytest.raises(UserError) as error:
        read_log(path)
    assert str(error.value).startswith(f"{path}, {message}") and "\n" not in str(error.value)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="byte 0 is not utf-8 text"):
        read_log(path)


def test_a_log_is_a_file(tmp_path: Path):
    assert read_log(tmp_path / "log.jsonl") == []
    os.mkfifo(tmp_path / "log.jsonl")  # would be waited for
    with pytest.raises(UserError, match=r"log\.jsonl is not a file"):
        read_log(tmp_path / "log.jsonl")
    with pytest.raises(UserError, match="is not a file"):
        read_log(tmp_path)
    lines = [{"step": 1, "kind": "train", "loss": None, "not_finite": ["loss"]}, {"step": 2, "kind": "eval", "a": 1}]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(tmp_path / "good.jsonl") == lines


def test_settings_are_a_file_of_their_size(tmp_path: Path):
    path = tmp_path / "config.yaml"
    for make, message in (
        (lambda: None, "no such settings file"),
        (lambda: os.mkfifo(path), "no such settings file"),
        (lambda: path.symlink_to("/dev/zero"), "no such settings file"),
        (lambda: path.write_bytes(b" " * (1 << 20)), "it has more than 524288 bytes"),
        (lambda: path.write_bytes(b"\xff"), "is not UTF-8 text"),
    ):
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(UserError, match=message):
            read_settings_text(path)


METRICS = {
    "val/accuracy_gt_boxes": 0.5,
    "val/none": None,
    "steps": 4,
    "parameters": {"task": 3},
    "best": {"metric": "val/accuracy_gt_boxes", "value": 0.5, "step": 2, "images": 6},
    "not_finite": ["val/none"],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"val/none": "\x1b[31m"}, "metrics.json: .* expected .*number"),
        ({"val/none": [1]}, "metrics.json"),
        ({"val/none": True}, "metrics.json"),
        ({"val/none": 1e308}, "metrics.json"),
        ({"parameters": {"task": "x"}}, "metrics.json: parameters"),
        ({"best": "x"}, "metrics.json: best is 'x'"),
        ({"best": [[]]}, "metrics.json: best is"),
        ({"best": {"metric": "x"}}, "metrics.json: best has no"),
        ({"best": {**METRICS["best"], "step": -1}}, "metrics.json: best.step is -1"),
        ({"steps": None}, "metrics.json has no 'steps'"),
    ],
)
def test_metrics_that_nobody_trusts(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(METRICS))
    assert read_metrics(path) == METRICS
    path.write_text(json.dumps(METRICS | change))
    with pytest.raises(UserError, match=f"{tmp_path}/{message}") as error:
        read_metrics(path)
    assert "\n" not in str(error.value)

"""Which files a command may write, and logs that nobody trusts."""

from __future__ import annotations

from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.run_files import check_output, read_log


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

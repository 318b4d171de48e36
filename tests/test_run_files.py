"""Which files a command may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.run_files import check_output


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

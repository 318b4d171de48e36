"""tools/predict.py split on tiny trained runs; files are read as their servers read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.cli import predict as tool
from tests.cli.calls import data_root, refused, saved, split
from tests.leaderboard import read_leaderboard, score
from tests.official_vqa import vqa_accuracy
from tests.same import assert_same

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("boxes", ["gt", "detections", "online"])
def test_boxes_of_expressions(trained_run, tmp_path, capsys, boxes):
    path = tmp_path / "deep" / "refcoco.json"
    assert tool.main(split(trained_run.path, "val", path, boxes=boxes)) == 0
    records = saved(trained_run.path, f"predictions_val_{boxes}.json")
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert_same(entries, [{key: record[key] for key in ("ref_id", "sent_id", "box")} for record in records])
    assert len({(entry["ref_id"], entry["sent_id"]) for entry in entries}) == len(records)
    suffix = {"gt": "gt", "detections": "detected", "online": "own"}[boxes]
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    expected = trained_run.metrics[f"val/accuracy_{suffix}_boxes"]
    assert float(printed[f"val/accuracy_{suffix}_boxes"]) == pytest.approx(expected, abs=1e-4)


def test_vqa_results(vqa_run, tmp_path, capsys):
    assert tool.main(split(vqa_run, "val", tmp_path / "val.json")) == 0
    assert "val/accuracy_gt_boxes" in capsys.readouterr().out
    records = saved(vqa_run)
    entries = json.loads((tmp_path / "val.json").read_text(encoding="utf-8"))
    assert entries == [{"question_id": r["question_id"], "answer": r["answer"]} for r in records]
    report = vqa_accuracy(entries, records, 12)
    assert report["overall"] == pytest.approx(100 * np.mean([record["correct"] for record in records]))

    # without annotations the answers are the same, and nothing is scored
    assert tool.main(split(vqa_run, "test", tmp_path / "test.json")) == 0
    printed = capsys.readouterr().out
    assert "accuracy" not in printed and "no labels" in printed
    assert json.loads((tmp_path / "test.json").read_text(encoding="utf-8")) == entries


def test_vcr_leaderboard_file(vcr_runs, tmp_path, capsys):
    answers, rationales = vcr_runs
    questions = {
        name: [json.loads(line) for line in (data_root(answers) / "vcr" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("val", "test")
    }
    both = ["--rationale-run", rationales]
    assert tool.main(split(answers, "test", tmp_path / "test.csv", *both)) == 0
    printed = capsys.readouterr().out
    assert "accuracy" not in printed and "Q->AR" not in printed
    assert (tmp_path / "test.csv").read_text().splitlines()[0].count(",") == 20
    assert read_leaderboard(tmp_path / "test.csv").annot_ids == [one["annot_id"] for one in questions["test"]]

    assert tool.main(split(answers, "val", tmp_path / "val.csv", *both)) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("val/"))
    found = read_leaderboard(tmp_path / "val.csv")
    assert found.annot_ids == [one["annot_id"] for one in questions["val"]]
    labels = [[one[f"{kind}_label"] for one in questions["val"]] for kind in ("answer", "rationale")]
    for name, value in score(found, *labels).items():
        assert float(printed[f"val/{name}_gt_boxes"]) == pytest.approx(value, abs=1e-4)
    right = [record["probabilities"] for record in saved(rationales)]
    np.testing.assert_allclose(found.rationales[range(len(right)), labels[0]], right, atol=1e-5)


@pytest.mark.timeout(900)
def test_two_processes_write_the_same_file(trained_run, tmp_path):
    assert tool.main(split(trained_run.path, "val", tmp_path / "one.json", "eval.images_per_batch=2")) == 0
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--"]
    words = split(trained_run.path, "val", tmp_path / "two.json", "eval.images_per_batch=2")
    subprocess.run(
        [sys.executable, *launch, str(ROOT / "tools" / "predict.py"), *words],
        check=True,
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=800,
    )
    assert_same(*(json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two")))


def test_runs_that_do_not_go_together(trained_run, vqa_run, vcr_runs, tmp_path, capsys):
    answers, rationales = vcr_runs
    path = tmp_path / "file"
    assert "needs two runs, the other one as --rationale-run" in refused(split(answers, "test", path), capsys)
    words = split(trained_run.path, "val", path, "--rationale-run", rationales)
    assert "task 'refcoco' needs one run." in refused(words, capsys)
    words = split(answers, "test", path, "--rationale-run", answers)
    assert "or give a run that was trained with it" in refused(words, capsys)
    words = split(answers, "val", path, "--rationale-run", vqa_run)
    assert "trained for different tasks" in refused(words, capsys)
    assert "holds no trained model" in refused(split(tmp_path, "val", path), capsys)
    message = refused(split(trained_run.path, "val", tmp_path), capsys)
    assert f"{tmp_path} is a folder; name the file" in message
    assert not path.exists()

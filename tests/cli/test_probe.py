"""`e2e-vl probe`: its files, and what it says where there is nothing to probe."""

from __future__ import annotations

import csv
import json

import pytest

from e2e_vl.analysis.probe_report import RESULT_FILES
from e2e_vl.cli import main as tool
from e2e_vl.config_files import save_config
from e2e_vl.data.refcoco import RefCOCODataset
from tests.cli.calls import is_picture, refused
from tests.conftest import ROOT
from tests.weights.starts import replaced

pytestmark = pytest.mark.usefixtures("on_cpu")
DETECTION = ROOT / "configs" / "demo" / "detection.yaml"


def test_a_run_is_probed_before_and_after_training(trained_run, tmp_path, capsys):
    output = tmp_path / "probe"
    words = ["probe", "--run", trained_run.path, "--max-checkpoints", 2, "--gradient-batches", 1, "--output", output]
    assert tool.main([*map(str, words), "--split", "val", "data.workers=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"page: {output / 'probe.html'}"
    for label in ("class", "colour", "texture", "size"):
        assert any(line.strip().startswith(f"{label} (chance") for line in lines)
    assert any(line.strip().startswith("res5 ") and "update" in line for line in lines)
    names = {path.name for path in output.iterdir()}
    pictures = {"accuracy_by_depth.png", "accuracy_over_steps.png", "gradients.png"}
    assert names == {"probe.html", "probe.json", "probe.csv", "gradients.csv", *pictures}
    assert all(is_picture(output / name) for name in pictures)
    results = json.loads((output / "probe.json").read_text("utf-8"))
    assert {row["step"] for row in results["probes"]} == {row["step"] for row in results["gradients"]} == {0, 8}
    assert results["labels"]["size"] == ["small", "big"] and results["notes"] == []
    with (output / "probe.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    depths = {row["depth"] for row in rows}
    assert depths >= {"stem", "res4", "region feature", "encoder 0", "encoder 2"}
    assert depths >= {"words, embeddings", "words, encoder 0", "words, encoder 2"}
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    page = (output / "probe.html").read_text("utf-8")
    assert page.count("data:image/png") == 3 and "region projection" in page
    assert "chance, words" in page and f"{results['phrases']} texts or phrases name one of them" in page


def test_runs_are_probed_beside_each_other_on_other_data(trained_run, tmp_path, tiny_data, capsys):
    """Objects of any COCO file; without texts that the task can read, the encoder is left out."""
    (tmp_path / "data.yaml").write_text(
        "{base: DETECTION, data: {root: ROOT, train_split: train, files: {images: images/train2014, instances: "
        "refcoco+/instances.json}}}".replace("ROOT", str(tiny_data)).replace("DETECTION", str(DETECTION))
    )
    words = ["probe", "--run", trained_run.path, trained_run.path / "model", "--data", tmp_path / "data.yaml"]
    words += ["--max-images", 4, "--max-checkpoints", 1, "--gradient-batches", 0, "--output", tmp_path / "probe"]
    assert tool.main([*map(str, words)]) == 0
    out = capsys.readouterr().out
    assert f"{trained_run.path}: accuracy" in out and "region feature" in out and "encoder" not in out
    assert not (tmp_path / "probe" / "gradients.csv").exists()
    page = (tmp_path / "probe" / "probe.html").read_text("utf-8")
    assert f"The words of {trained_run.path} are not probed, because it does not read the texts of these data." in page


def test_texts_that_refer_to_no_object_are_not_probed(trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(RefCOCODataset, "has_phrases", False)
    words = ["probe", "--run", trained_run.path, "--max-images", 4, "--max-checkpoints", 2, "--gradient-batches", 0]
    assert tool.main([*map(str, words), "--output", str(tmp_path / "probe"), "data.workers=0"]) == 0
    sentence = "The words are not probed, because no text of these data refers to one annotated object."
    assert capsys.readouterr().out.count(sentence) == 1
    assert (tmp_path / "probe" / "probe.html").read_text("utf-8").count(sentence) == 1
    results = json.loads((tmp_path / "probe" / "probe.json").read_text("utf-8"))
    depths = {row["depth"] for row in results["probes"]}
    assert "encoder 2" in depths and "words, embeddings" not in depths


def test_precomputed_features_have_no_detector_to_probe(trained_run, tmp_path, capsys):
    config = replaced(trained_run.config, detector={"backend": "precomputed", "loss_weight": 0.0})
    (tmp_path / "run" / "model").mkdir(parents=True)
    save_config(config, tmp_path / "run" / "model" / "config.yaml")
    message = refused(["probe", "--run", tmp_path / "run"], capsys)
    assert "precomputed features, so there is no detector to probe" in message
    assert "needs a run directory" in refused(["probe", "--run", "data.root=x"], capsys)


def test_files_of_others_are_not_replaced(trained_run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert "choose another --output" in refused(["probe", "--run", trained_run.path, "--output", tmp_path], capsys)
    assert "probe.html" in RESULT_FILES

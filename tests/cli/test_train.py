"""`e2e-vl train` and `evaluate`: files found from another directory, and errors of one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from e2e_vl.cli.run import evaluate, train
from tests.conftest import ROOT, SAME_SIZE

SHORT = ("train.max_steps=1", "eval.boxes=[gt]", "eval.every_epochs=0", "eval.report_pictures=1", SAME_SIZE)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def project(tmp_path, tiny_data) -> Path:
    """A folder with settings and data beside each other, as in the repository."""
    shutil.copytree(ROOT / "configs", tmp_path / "project" / "configs")
    shutil.copytree(tiny_data, tmp_path / "project" / "data" / "tiny_refcoco")
    return tmp_path / "project"


def test_a_run_is_trained_and_evaluated_from_other_directories(project, tmp_path, monkeypatch, capsys):
    """Detector and data are found beside the settings, the run goes where the command was called, and it saves paths
    that still lead from it to the project."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train(["--config", "../project/configs/tiny/refcoco.yaml", *SHORT]) == 0
    run = tmp_path / "elsewhere" / "runs" / "tiny_refcoco"
    records = json.loads((run / "predictions_val_gt.json").read_text())
    assert all(Path(record["file_name"]).is_relative_to(project / "data") for record in records)
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"runs"}
    monkeypatch.chdir(tmp_path)
    assert evaluate(["--run", str(run.relative_to(tmp_path)), "--split", "val", "--boxes", "gt"]) == 0
    assert "val/accuracy_gt_boxes" in capsys.readouterr().out


def test_a_missing_image_is_one_sentence_also_from_a_worker(project, tiny_words, tmp_path, capfd):
    data = project / "data" / "tiny_refcoco"
    image = min((data / "images" / "train2014").iterdir())
    image.unlink()
    words = [*tiny_words, f"data.root={data}", f"output={tmp_path / 'run'}", "data.workers=1"]
    words += ["data.texts_per_image=null", "data.check_images=0", "train.max_steps=6"]
    assert train(["--config", str(ROOT / "configs" / "tiny" / "refcoco.yaml"), *words]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err and err.splitlines()[-1].startswith("error: ") and str(image) in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--split", "testC"], "'testC'"),
        (["--boxes", "gt", "detector.weights=x.pth"], "detector.weights=x.pth"),  # a run has weights of its own
        (["--boxes", "gt", "encoder.config.num_hidden_layers=3"], "model.safetensors does not fit"),
    ],
)
def test_what_does_not_fit_a_run_is_one_sentence(trained_run, capfd, arguments, named):
    assert evaluate(["--run", str(trained_run.path), *arguments]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err and named in err.splitlines()[-1]

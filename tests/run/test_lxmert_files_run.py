"""Runs on the files of the official LXMERT code, drawn: pre-training, questions and pairs, without opening an image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.config import RunConfig, load_config
from e2e_vl.io import read_log
from e2e_vl.run.train import train
from e2e_vl.synthetic import make_scenes

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lxmert") / "data"
    make_scenes(folder, scenes={"train": 8, "val": 4}, formats=["lxmert"])
    for path in (folder / "images").rglob("*.jpg"):
        path.unlink()  # features are all that is read
    return folder


def settings(name: str, data: Path, output: Path, *words: str) -> RunConfig:
    """A published config with the parts of configs/tiny/lxmert_files.yaml in the place of the large ones."""
    tiny = load_config(CONFIGS / "tiny" / "lxmert_files.yaml")
    encoder = [f"encoder.config.{key}={value}" for key, value in tiny.encoder.config.items()
               if key != "masked_region_feature"]  # fmt: skip
    common = [f"data.root={data}", f"output={output}", "data.vocabulary=null", "data.workers=0", "train.max_steps=2"]
    common += [f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}", "train.images_per_batch=2"]
    common += ["detector.overrides={MODEL: {RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8, "
               "WIDTH_PER_GROUP: 8}}}", "data.train_split=train", "data.eval_splits=[val]"]  # fmt: skip
    return load_config(CONFIGS / f"{name}.yaml", [*common, *encoder, *words])


def test_pretraining(data, tmp_path):
    answers = data / "lxmert" / "all_ans.json"
    words = [f"task.config.objectives.image_qa.answers={answers}", "task.config.region_probability=0.5"]
    metrics = train(settings("tiny/lxmert_files", data, tmp_path / "run", *words))
    [*_, losses] = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "train"]
    names = {"masked_words", "relationship", "object_labels", "attribute_labels", "region_features", "image_qa"}
    assert names <= set(losses) and all(0 <= losses[name] < 100 for name in names)
    assert {f"val/{name}_precomputed_boxes" for name in ("object_labels", "attribute_labels")} <= set(metrics)


def test_questions(data, tmp_path):
    sets = ["data.config.image_sets={train: train, val: val}", "data.files.questions=lxmert/{split}_vqa.json"]
    sets += ["data.files.features=lxmert/{images}_obj36.tsv", "train.keep_best=null"]
    sets += ["data.files.answers=lxmert/trainval_label2ans.json"]
    metrics = train(settings("vqa/lxmert", data, tmp_path / "run", *sets))
    records = json.loads((tmp_path / "run" / "predictions_val_precomputed.json").read_text())
    score = sum(record["answer_scores"].get(record["answer"], 0.0) for record in records) / len(records)
    assert metrics["val/accuracy_precomputed_boxes"] == pytest.approx(score)


def test_pairs(data, tmp_path):
    sets = ["data.files.examples=lxmert/{split}_nlvr2.json", "data.files.features=lxmert/{split}_obj36.tsv"]
    metrics = train(settings("nlvr2/lxmert", data, tmp_path / "run", *sets, "train.keep_best=null"))
    assert 0 <= metrics["val/accuracy_precomputed_boxes"] <= 1
    [record, *_] = json.loads((tmp_path / "run" / "predictions_val_precomputed.json").read_text())
    assert record["prediction"] in ("True", "False") and record["label"] in ("True", "False")

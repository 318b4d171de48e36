"""Questions of other data sets, with one right answer each, as data augmentation of VQA's fine-tuning (LXMERT)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e_vl.config_files import load_config
from e2e_vl.io import read_json
from e2e_vl.run.train import train
from e2e_vl.synthetic.generate import make_scenes
from tests.run.runs import ROOT, TINY_DETECTOR
from tests.run.test_objectives_learned import LOOKS, NARROW, SceneConfig

AUGMENTED = ROOT / "configs" / "vqa" / "lxmert_augmented.yaml"
FEW = 4  # questions of VQA about colours

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few questions of VQA about colours, and others' about 120 images, whose answers are sentences or in no list."""
    folder = tmp_path_factory.mktemp("augmented") / "data"
    config = SceneConfig(min_objects=1, max_objects=1, **LOOKS)
    make_scenes(folder, scenes={"train": 120, "val": 60}, config=config, formats=["lxmert"])
    files = folder / "lxmert"
    few, new = (
        [one for one in read_json(files / f"{split}_vqa.json") if one["question_type"] == "what color is the"]
        for split in ("train", "val")
    )
    few, others = few[:FEW], {one["img_id"]: one for one in few[FEW:]}
    rows = []
    for one in others.values():
        answer = max(one["label"], key=one["label"].get)
        labels = {f"The {answer.title()}.": 1.0}, {"In a corner.": 1.0}
        sentences = {"visual7w": [one["sent"], "Where is it?"]}
        rows.append({"img_id": one["img_id"], "sentf": sentences, "labelf": {"visual7w": labels}})
    for name, content in {"few_vqa": few, "val_vqa": new, "others": rows}.items():
        (files / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def accuracy(data: Path, run: Path, split: str) -> float:
    """Of VQA's questions about new images, after a training on `alone` or, with the others, on `train`."""
    files = "features: 'lxmert/{images}_obj36.tsv'"
    sizes = "{DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8, WIDTH_PER_GROUP: 8}"  # 64 features
    config = load_config(
        AUGMENTED,
        [
            *(TINY_DETECTOR, f"detector.overrides.MODEL.RESNETS={sizes}", f"data.root={data}", f"output={run}"),
            "data.config.datasets.questions={splits: {alone: few, train: few, minival: val}, files: {questions: "
            f"'lxmert/{{split}}_vqa.json', {files}}}, config: {{image_sets: {{few: train, val: val}}}}}}",
            "data.config.datasets.others={splits: {train: others}, files: {sentences: "
            f"'lxmert/{{split}}.json', {files}}}, config: {{image_sets: {{others: train}}}}}}",
            f"task.config.answers={data / 'lxmert' / 'trainval_label2ans.json'}",
            f"data={{train_split: {split}, vocabulary: null, workers: 0, texts_per_image: 2}}",
            "data.boxes.max_precomputed=2",
            f"encoder.config={{{NARROW}, l_layers: 1, r_layers: 1, x_layers: 1, initializer_range: 0.2}}",
            "train={images_per_batch: 8, max_steps: 120, lr: 2.0e-3, optimizer: adamw, metric_for_best_model: null}",
            "eval={every_epochs: 0, images_per_batch: 60}",
        ],
    )
    return train(config)["minival/accuracy_precomputed_boxes"]


def test_questions_of_others_help(data, tmp_path):
    with_others = accuracy(data, tmp_path / "with_others", "train")
    alone = accuracy(data, tmp_path / "alone", "alone")
    assert with_others > 0.8 and alone < 0.6, (with_others, alone)

"""Phrases of one data set beside a task that learns from another: trained, evaluated, reported, written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.batching import Request
from e2e_vl.io import read_log
from e2e_vl.run.build import build_run
from e2e_vl.run.inference import predict_split
from e2e_vl.run.train import train
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
INSTANCES = "refcoco+/instances.json"
DETECTIONS = "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"
CAPTIONS = {
    "name": "flickr30k",
    "splits": {"train": "train", "val": "val"},
    "images": "scenes",
    "config": {"image_name": "COCO_train2014_{id:0>12}.jpg"},
    "files": {
        "images": "images/train2014",
        "ids": "flickr30k/{split}.txt",
        "sentences": "flickr30k/Sentences",
        "annotations": "flickr30k/Annotations",
        "instances": INSTANCES,
    },
}
ANSWERS = {"answers": ["yes", "no", "red", "blue", "green", "circle", "square", "star", *map(str, range(6))]}
# of each task: its part of the data beside what its tiny config says, its settings, and its key of a record
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vqa": ({"images": "scenes"}, ANSWERS, "question_id"),
    "gqa": ({"images": "scenes", "splits": {"train": "train_balanced", "val": "val_all"}}, ANSWERS, "question_id"),
    "nlvr2": ({}, {}, "identifier"),
    "refcoco": ({"images": "scenes"}, {}, "ref_id"),
}
LOSSES = {"refcoco": "referring"}

pytestmark = pytest.mark.usefixtures("on_cpu")


def settings(name: str, tmp_path: Path, *words: str) -> RunConfig:
    """The tiny run of a task, joined with the captions of Flickr30K's format."""
    drawn = {"refcoco+", "detections", "flickr30k"} | ({name} - {"refcoco"})
    config = load_config(
        ROOT / "configs" / "tiny" / f"{name}.yaml",
        [
            f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
            f"data.root={tmp_path / 'data'}",
            f"output={tmp_path / 'run'}",
            f"data.synthetic.formats=[{', '.join(sorted(drawn))}]",
            *("data.synthetic.scenes={train: 4, val: 3}", "data.texts_per_image=2", "data.boxes.train=gt"),
            *("phrases={weight: 1.0, layer: 1, size: 8}", "train.max_steps=3", "train.warmup_steps=0"),
            *("eval.boxes=[gt]", "eval.every_epochs=0", "eval.report_pictures=2", *words),
        ],
    )
    part, of_task, _ = TASKS[name]
    known = {key: file for key, file in config.data.files.items() if key != "detections"}
    own = {"name": name, "splits": {"train": "train", "val": "val"}, "files": known, "config": config.data.config}
    return replaced(
        config,
        data={
            "name": "joined",
            "files": {"detections": DETECTIONS},
            "config": {"parts": {"asked": own | part, "said": CAPTIONS}},
            "train_split": "train",
            "eval_splits": ["val"],
        },
        task={"config": config.task.config | of_task},
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_run_whose_phrases_are_of_other_data(tmp_path, name):
    metrics = train(settings(name, tmp_path))
    run, key = tmp_path / "run", TASKS[name][2]
    log = [line for line in read_log(run / "log.jsonl") if line["kind"] == "train"]
    for loss in (LOSSES.get(name, name), "phrases", "phrase_tags"):
        assert any(line[loss] > 0 for line in log) and all(0 <= line[loss] < 100 for line in log), loss
    records = json.loads((run / "predictions_val_gt.json").read_text())
    captions = [record for record in records if record["type"] == "PhrasesOnly"]
    questions = [record for record in records if record["type"] != "PhrasesOnly"]
    assert captions and questions
    assert all(key in record for record in questions) and not any(key in record for record in captions)
    assert all("correct" not in record and record["grounded"] for record in captions)
    assert not any({"answer", "prediction", "box", "score"} & record.keys() for record in captions)
    scores = [record["correct"] for record in questions]
    assert metrics["val/count_gt_boxes"] == len(questions)
    if name != "gqa":  # which counts balanced questions only
        assert metrics["val/accuracy_gt_boxes"] == pytest.approx(sum(scores) / len(scores))
    assert 0 <= metrics["val/phrase_accuracy_gt_boxes"] <= 1
    assert (run / "report.html").is_file()
    predict_split(run, split="val", boxes="gt", output=tmp_path / "submission")
    text = (tmp_path / "submission").read_text()
    assert len(text.splitlines() if name == "nlvr2" else json.loads(text)) == len(questions)


def test_captions_add_nothing_to_the_loss_of_questions(tmp_path):
    """The loss of a mixed batch is the loss of its questions, and its gradients reach the questions only."""
    built = build_run(settings("vqa", tmp_path))
    data, model = built.train_data, built.model.eval()
    members = data.dataset.members
    number = len(members[0])  # the captions begin behind the questions
    examples = [data[Request(group, tuple(data.groups[group][:2]))] for group in range(len(data.groups))]
    is_known = [record["text_index"] < number for one in examples for record in (text.record for text in one.texts)]
    batch = built.collate(examples)
    assert batch.targets.has_target.tolist() == is_known and {*is_known} == {True, False}
    assert not batch.targets.scores[~batch.targets.has_target].any()
    with torch.no_grad():
        output = model(batch)
    encoded = output.encoded
    encoded.summary = encoded.summary.clone().requires_grad_()
    task = model.task(batch, output.text_regions, encoded)
    loss, known = task.losses["vqa"], batch.targets.has_target
    expected = F.binary_cross_entropy_with_logits(task.logits[known], batch.targets.scores[known], reduction="sum")
    assert loss.total.item() == expected.item() > 0 and float(loss.count) == sum(is_known)
    loss.total.backward()
    model.zero_grad()
    reached = encoded.summary.grad.abs().amax(dim=1) > 0
    assert reached.tolist() == is_known

    captions = built.collate([one for one in examples if one.texts[0].record["text_index"] >= number])
    alone = model(captions).task_losses
    assert (alone["vqa"].total.item(), alone["vqa"].count.item()) == (0, 0), "the loss is there on every process"
    assert alone["phrases"].total > 0 and alone["phrases"].count > 0
    alone["vqa"].total.backward()
    assert all(one.grad is None or not one.grad.any() for one in model.parameters())
    questions = built.collate([one for one in examples if one.texts[0].record["text_index"] < number])
    assert questions.targets.has_target is None


def test_questions_beside_descriptions_of_regions(tmp_path):
    """Visual Genome's descriptions have no truth at all, only phrases."""
    words = ("detector.loss_weight=0", "data.boxes.train=detections", "eval.boxes=[detections]", "train.max_steps=2")
    config = settings("vqa", tmp_path, *words, "data.synthetic.formats=[refcoco+, detections, vqa, visual_genome]")
    regions = {
        "name": "visual_genome",
        "splits": {"train": "train"},
        "files": {
            "images": "visual_genome",
            "image_data": "visual_genome/image_data_{split}.json",
            "regions": "visual_genome/region_descriptions_{split}.json",
            "region_graphs": "visual_genome/region_graphs_{split}.json",
        },
    }
    parts = {"asked": config.data.config["parts"]["asked"], "said": regions}
    metrics = train(replaced(config, data={"config": {"parts": parts}}))
    log = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "train"]
    assert all(any(line[loss] > 0 for line in log) for loss in ("vqa", "phrases"))
    records = json.loads((tmp_path / "run" / "predictions_val_detections.json").read_text())
    assert records and all("question_id" in record for record in records), "evaluated on the questions alone"
    assert metrics["val/count_detected_boxes"] == len(records)


def test_vcr_is_told_to_join_data_with_phrases(tmp_path):
    words = (
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        *(f"data.root={tmp_path}", f"output={tmp_path / 'run'}", "phrases={weight: 1, layer: 1}"),
        *("data.synthetic.formats=[vcr]", "data.synthetic.scenes={train: 4, val: 3, test: 1}"),
    )
    config = load_config(ROOT / "configs" / "tiny" / "vcr.yaml", words)
    with pytest.raises(ValueError, match=r"no text of vcr says what its phrases name; set it to 0, or join data"):
        build_run(config)


def test_a_task_is_told_to_join_data_with_phrases(tmp_path):
    config = settings("vqa", tmp_path)
    part = {"asked": config.data.config["parts"]["asked"]}
    with pytest.raises(ValueError, match=r"no text of joined says .* set it to 0, or join data"):
        build_run(replaced(config, data={"config": {"parts": part}}))


def test_tasks_that_cannot_take_other_texts_are_refused(tmp_path, monkeypatch):
    config = settings("vqa", tmp_path)
    monkeypatch.setattr("e2e_vl.tasks.vqa.VQAPreprocessor.learns_from", ())
    with pytest.raises(ValueError, match=r"the task vqa cannot take texts that have phrases and no target of its own"):
        build_run(config)


def test_without_phrases_such_texts_stay_an_error(tmp_path):
    config = settings("vqa", tmp_path, "phrases.weight=0")
    with pytest.raises(ValueError, match=r"VQATargets: scores is known for some texts of a batch and unknown"):
        train(config)

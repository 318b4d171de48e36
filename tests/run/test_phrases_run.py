"""Phrases beside a task, from files to an answer, of the task's own data or of data that are joined with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request
from e2e_vl.run.build import build_model, build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate_run, phrase_weights, predict_split
from e2e_vl.run.train import train
from tests.run.runs import ROOT, SHORT, first_texts, logged, predictions_of, tiny
from tests.same import assert_same
from tests.weights.starts import options, replaced

HEAD = "phrases={weight: 1.0, layer: 1, size: 8, short_path_weight: 0.5}"
OWN_PHRASES = (
    HEAD,
    "data.files.phrases=refcoco+_phrases/Sentences",
    "data.files.phrase_boxes=refcoco+_phrases/Annotations",
    "encoder.config.relative_geometry=true",
)


def files_of(name: str) -> dict[str, str]:
    """The annotation files of a tiny config."""
    files = load_config(ROOT / "configs" / "tiny" / f"{name}.yaml").data.files
    return {key: file for key, file in files.items() if key != "detections"}


DETECTIONS = "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"
CAPTIONS = {
    "name": "flickr30k",
    "splits": {"train": "train", "val": "val"},
    "images": "scenes",
    "config": {"image_name": "COCO_train2014_{id:0>12}.jpg"},
    "files": files_of("flickr30k"),
}
ANSWERS = {"answers": ["yes", "no", "red", "blue", "green", "circle", "square", "star", *map(str, range(6))]}
# of each task: its part of the data beside what its tiny config says, and its settings
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vqa": ({"images": "scenes"}, ANSWERS),
    "gqa": ({"images": "scenes", "splits": {"train": "train_balanced", "val": "val_all"}}, ANSWERS),
    "nlvr2": ({}, {}),
    "refcoco": ({"images": "scenes"}, {}),
    "vcr": ({}, {}),
}
LOSSES = {"refcoco": "referring", "vcr": "choice"}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
LAYERS = {
    "vl_bert": {"num_hidden_layers": 2, "geometry_dim": 16, "with_pooler": True, "masked_region_embedding": True},
    "visual_bert": {"num_hidden_layers": 2, "train_pooler": True},
    "lxmert": {"l_layers": 1, "r_layers": 1, "x_layers": 1, "masked_region_feature": True},
}
# the official start of 0 lets no gradient through
LAYERS["vl_bert"] |= {"visual_scale_text_init": 1.0, "visual_scale_object_init": 1.0}
NEEDED = {"nlvr2": {"max_images": 2}, "vcr": {"named_regions": True}}  # of LXMERT by a task


pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Each task's scenes are drawn once."""
    return tmp_path_factory.mktemp("phrases")


def test_tags_and_the_short_path_have_weights_relative_to_that_of_phrases():
    words = "phrases={weight: 2.0, tag_weight: 0.25, short_path_weight: 3.0}"
    config = load_config(ROOT / "configs/tiny/refcoco.yaml", [words])
    assert phrase_weights(config) == {"phrases": 2.0, "phrase_tags": 0.5, "short_path": 6.0}


def alone(task: str, folder: Path, *words: str) -> RunConfig:
    """The tiny run of a task on a few scenes."""
    formats = ", ".join(sorted({"refcoco+", "detections", "flickr30k", task} - {"refcoco"}))
    synthetic = f"data.synthetic={{scenes: {{train: 4, val: 4}}, formats: [{formats}]}}"
    common = HEAD, synthetic, "data={texts_per_image: 2, boxes: {train: gt}}", "train.warmup_steps=0"
    return tiny(task, folder / f"{task}_data", folder / "run", *common, *SHORT, *words)


def joined(task: str, folder: Path, *words: str, instances: bool | None = None) -> RunConfig:
    """The same, joined with captions of Flickr30K's format; `instances`: with a file of the classes of their boxes."""
    config = alone(task, folder, *words)
    part, of_task = TASKS[task]
    is_vcr = task == "vcr"
    known = {key: file for key, file in config.data.files.items() if is_vcr or key != "detections"}
    own = {"name": task, "splits": {"train": "train", "val": "val"}, "files": known}
    own["config"] = options(config.data.config)
    has_instances = not is_vcr if instances is None else instances
    files = {key: file for key, file in CAPTIONS["files"].items() if has_instances or key != "instances"}
    return replaced(
        config,
        data={
            "name": "joined",
            "files": {} if is_vcr else {"detections": DETECTIONS},
            "config": {"datasets": {"asked": own | part, "said": CAPTIONS | {"files": files}}},
            "train_split": "train",
            "eval_splits": ["val"],
        },
        task={"config": options(config.task.config) | of_task},
    )


# Phrases of the task's own texts


def test_a_run_with_phrases(tiny_config):
    config = tiny_config(*OWN_PHRASES, *SHORT)
    metrics = train(config)
    run = Path(config.output)
    assert all(line[name] > 0 for line in logged(run) for name in ("phrases", "phrase_tags"))
    assert 0 <= metrics["val/phrase_accuracy_gt_boxes"] <= 1
    states = [load_model(run / "checkpoints" / f"step_{step:08}" / "model")[1].state_dict() for step in (1, 2)]
    moved = {name for name, value in states[1].items() if not torch.equal(value, states[0][name])}
    assert {"phrase_head.query.weight", "phrase_head.tags.weight"} <= moved
    assert any(name.startswith("encoder.relative_geometry.output") for name in moved)

    evaluated, path = evaluate_run(run, split="val", boxes="gt")
    assert_same(evaluated, {name: metrics[name] for name in evaluated})
    records = json.loads(path.read_text(encoding="utf-8"))
    related = [record for record in records if record.get("family", "").startswith("relation")]
    assert related and all(len(record["grounded"]) == 2 for record in related)
    assert {type(phrase["correct"]) for record in records for phrase in record["grounded"]} == {bool}

    assert load_model(run, overrides=["phrases.weight=0"])[1].phrase_head is None
    with pytest.raises(ValueError, match=r"phrases.size: 8 -> 9"):
        train(replaced(config, phrases={"size": 9}), resume=True)
    words = (*OWN_PHRASES, f"data.vocabulary={run / 'model' / 'tokenizer'}", f"phrases.weights={run}")
    own = build_run(tiny_config(*words, "output=unused")).model.phrase_head.state_dict()
    saved = load_file(run / "model" / "phrases" / "model.safetensors")
    assert own.keys() == saved.keys() and all(torch.equal(value, saved[name]) for name, value in own.items())
    for change, sentence in (
        ("phrases.layer=2", r"reads the states after 1 layers, and phrases.layer is 2"),
        ("phrases.size=9", "does not fit the model's config"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build_model(tiny_config(*words, change), vocab_size=50)


# Phrases of other data


@pytest.mark.parametrize("task", ["nlvr2", "vcr"])
def test_a_run_whose_phrases_are_of_other_data(folder, tmp_path, task):
    config = joined(task, folder, f"output={tmp_path / 'run'}")
    metrics = train(config)
    run = tmp_path / "run"
    for loss in (LOSSES.get(task, task), "phrases", "phrase_tags", *(["region_class"] if task == "vcr" else [])):
        log = logged(run)
        assert any(line[loss] > 0 for line in log) and all(0 <= line[loss] < 100 for line in log), loss
    records = predictions_of(run)
    captions = [record for record in records if record["type"] == "PhrasesOnly"]
    questions = [record for record in records if record["type"] != "PhrasesOnly"]
    assert captions and questions
    assert all(record.get("correct") is None and record["grounded"] for record in captions)
    scores = [record["correct"] for record in questions]
    assert metrics.get("val/count_gt_boxes", len(questions)) == len(questions)
    assert metrics["val/accuracy_gt_boxes"] == pytest.approx(sum(scores) / len(scores))
    assert 0 <= metrics["val/phrase_accuracy_gt_boxes"] <= 1
    if task == "nlvr2":
        predict_split(run, split="val", boxes="gt", output=tmp_path / "submission")
        assert len((tmp_path / "submission").read_text().splitlines()) == len(questions)


def test_what_cannot_have_phrases(tiny_config, folder, monkeypatch):
    with pytest.raises(ValueError, match=r"phrases.weight needs an encoder"):
        build_model(replaced(tiny_config("phrases.weight=1"), encoder={"name": "none", "config": {}}), vocab_size=50)
    with pytest.raises(ValueError, match=r"phrases.layer is 7, but the encoder has \d multimodal layers"):
        build_model(tiny_config("phrases={weight: 1, layer: 7}"), vocab_size=50)
    config = joined("vqa", folder)
    with pytest.raises(ValueError, match=r"the texts of vcr have no phrases .*; join data that have some"):
        build_run(alone("vcr", folder))
    with pytest.raises(ValueError, match="objects of different classes"):
        build_run(joined("vcr", folder, instances=True))
    monkeypatch.setattr("e2e_vl.tasks.question_answering.AnswerPreprocessor.learns_from", ())
    with pytest.raises(ValueError, match=r"the task vqa can learn from"):
        build_run(config)


# Names in VCR's texts


def test_names_as_phrases(folder, tmp_path):
    words = ("data.config.names_are_phrases=true", "task.config.ground_words=false", "data.flip=1")
    config = alone("vcr", folder, *words, f"output={tmp_path / 'run'}")
    train(config)
    for record in predictions_of(tmp_path / "run"):
        text = f"{record['text']} {record['choices'][record['choice']]}"
        names = [name for name, _ in record["named_boxes"]]
        assert "correct" in record["grounded"][0], "each question names an object"
        for phrase in record["grounded"]:
            assert phrase["text"] in names and phrase["text"] in text

    data = build_run(config).train_data
    example = data[Request(0, tuple(data.groups[0][:1]))]
    [image] = example.images
    assert image.image_transform.flipped and len(example.texts) == 4
    for text in example.texts:
        stated: dict[str, list] = {}  # several objects may have one name
        for name, named in text.record["named_boxes"]:
            stated.setdefault(name, []).append(named)
        assert len(text.phrases.spans) == len(text.phrases.boxes) > 0
        for (first, end), box in zip(text.phrases.spans, text.phrases.boxes, strict=True):
            start, stop = text.phrases.offsets[first][0], text.phrases.offsets[end - 1][1]
            ours = image.image_transform.transform_boxes(np.array(stated[text.phrases.words[start:stop]]))
            assert (np.abs(np.asarray(box) - ours).max(axis=1) <= 1.5).any()


# Every encoder


def gradients_reach(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """The gradients of a loss reach the encoder and the detector's backbone."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    for part in (model.detector.backbone, model.encoder):
        assert any(value.grad is not None and value.grad.any() for value in part.parameters())


@pytest.mark.parametrize(
    ("task", "encoder"),
    [
        *(("refcoco", "visual_bert"), ("nlvr2", "lxmert"), ("vqa", "vl_bert")),
        *(("gqa", "visual_bert"), ("vcr", "lxmert"), ("flickr30k", "vl_bert")),
    ],
)
def test_phrases_beside_each_task_train_the_backbone_of_each_encoder(folder, task, encoder):
    own = SIZES | LAYERS[encoder] | (NEEDED.get(task, {}) if encoder == "lxmert" else {}) | {"relative_geometry": True}
    config = alone(task, folder) if task == "flickr30k" else joined(task, folder)
    run = build_run(replaced(config, encoder={"name": encoder, "config": own}))
    model, batch = run.model.train(), first_texts(run)
    output = model(batch)
    assert LOSSES.get(task, task) in output.losses and {"phrases", "phrase_tags", "short_path"} <= output.losses.keys()
    assert all(torch.isfinite(loss.total) and loss.count > 0 for loss in output.losses.values())
    gradients_reach(model, output.losses["phrases"].mean)
    gradients_reach(model, output.losses["short_path"].mean)
    with torch.no_grad():
        evaluated = model.eval()(batch)
    assert evaluated.phrases.log_attention.shape[0] == evaluated.phrases.spans.counts.sum() > 0


@pytest.mark.parametrize("encoder", ["vl_bert", "lxmert"])
def test_phrases_in_pretraining(folder, encoder):
    """On captions without phrases, Flickr30K and Visual Genome joined."""
    drawn = "data.synthetic={scenes: {train: 3}, formats: [captions, flickr30k, visual_genome, detections]}"
    captions = {"images": "images/train2014", "captions": "captions/captions_{split}.json"}
    flickr = {key: file for key, file in CAPTIONS["files"].items() if key != "instances"}
    parts = {
        "captions": {"name": "captions", "files": captions},
        "flickr": {"name": "flickr30k", "files": flickr, "config": CAPTIONS["config"]},
        "genome": {"name": "visual_genome", "files": files_of("visual_genome")},
    }
    parts = {name: part | {"splits": {"train": "train"}, "images": "drawn"} for name, part in parts.items()}
    objectives = {"masked_text": 0.0, "relationship": 1.0, "masked_regions": {"classes": 7}}
    config = replaced(
        tiny("visual_genome", folder / "pretraining_data", folder / encoder, drawn),
        data={"name": "joined", "files": {"detections": DETECTIONS}, "config": {"datasets": parts}},
        encoder={"name": encoder, "config": SIZES | LAYERS[encoder]},
        task={"config": {"objectives": objectives}},
    )
    run = build_run(config)
    groups, dataset = run.train_data.groups, run.train_data.dataset
    starts = zip(dataset.members, dataset.starts[:-1], strict=True)
    first = [member.dataset.groups[0][0] + start for member, start in starts]
    chosen = [number for number, texts in enumerate(groups) if texts[0] in first]
    batch = run.collate([run.train_data[Request(number, tuple(groups[number][:2]))] for number in chosen])
    counts = batch.phrases.spans.counts.tolist()
    assert counts[0] == 0 and len(chosen) == 3 and sum(counts) > 0
    output = run.model.train()(batch)
    learned = {"phrases", "phrase_tags", "masked_words", "relationship", "masked_regions"}
    assert learned == set(output.losses) and all(torch.isfinite(loss.total) for loss in output.losses.values())
    assert output.losses["phrases"].count > 0
    gradients_reach(run.model, output.losses["phrases"].mean)

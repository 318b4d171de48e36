"""What CONTRIBUTING.md promises: a new part is one module (in `extensions/`) and one entry in a dict of build.py.

Nothing else changes. Every part is trained, resumed, evaluated and asked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import e2e_vl
from e2e_vl import parts
from e2e_vl.cli import predict as tool
from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.base import DataNeeds, open_options
from e2e_vl.data.batching import Request
from e2e_vl.data.config import NoOptions
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.io import read_log
from e2e_vl.parts import Part
from e2e_vl.run import build
from e2e_vl.run.build import build_collate, build_examples, build_run, make_synthetic_data
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from e2e_vl.samples import Sample
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.text import swap_left_right
from tests.cli.calls import ask, first_image, is_picture, refused, saved, told
from tests.run.extensions import (
    grounding,
    image_pairs,
    named_scenes,
    phrases,
    pooled_encoder,
    region_features,
    statements,
)
from tests.run.test_resume import lose_newest
from tests.same import assert_same

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "run" / "extensions" / "tiny.yaml"
SHORT = ("train.max_steps=2", "train.save_every_epochs=0.01", "eval.every_epochs=0", "eval.boxes=[gt]")

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def settings(tmp_path) -> Callable[..., RunConfig]:
    def make(*words: str, config: Path = TINY, **sections: dict) -> RunConfig:
        places = f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}", f"data.root={tmp_path / 'data'}"
        loaded = load_config(config, [*places, f"output={tmp_path / 'run'}", *SHORT, *words])
        changed = {name: type(getattr(loaded, name))(**fields) for name, fields in sections.items()}
        return msgspec.structs.replace(loaded, **changed)

    return make


def live(config: RunConfig) -> Path:
    """Train two steps, once more the second one alone, and evaluate the saved model; returns the run directory."""
    metrics = train(config)
    run = Path(config.output)
    again = msgspec.structs.replace(config, output=f"{config.output}_resumed")
    lose_newest(run, Path(again.output))
    train(again, resume=True)
    assert read_log(run / "log.jsonl") == read_log(Path(again.output) / "log.jsonl")
    assert (run / "report.html").is_file()
    for boxes in config.eval.boxes:
        again, path = evaluate_run(run, split="val", boxes=boxes, output=run / "again.json")
        assert_same(again, {name: metrics[name] for name in again})
        assert again
        assert_same(json.loads(path.read_text()), saved(run, f"predictions_val_{boxes}.json"))
    return run


def asked(run: Path, folder: Path, image: Path | tuple[Path, ...], text: str, *more: object) -> dict:
    assert tool.main(ask(run, image, text, *more, "--output", folder)) == 0
    assert is_picture(folder / "regions.png") and is_picture(folder / "answer.png")
    return told(folder)


# An encoder


POOLED = {"name": "pooled", "config": {"hidden_size": 16}}
QUESTIONS = {
    "refcoco": ("the red circle", ()),
    "vqa": ("what color is the circle?", ()),
    "vcr": (
        "Why is [0] near [1] ?",
        ("--boxes", "person:5,6,40,50", "kite:30,20,70,61", "--choices", *"ab", "[1]", "d"),
    ),
    "pretraining": ("a [MASK] circle", ("--hide", "5,6,40,50")),
}


@pytest.mark.parametrize("task", QUESTIONS)
def test_an_encoder(settings, monkeypatch, tmp_path, task):
    monkeypatch.setitem(parts.ENCODERS, "pooled", Part(pooled_encoder.PooledSettings, pooled_encoder.PooledEncoder))
    run = live(settings(config=ROOT / "configs" / "tiny" / f"{task}.yaml", encoder=POOLED))
    _, model, _ = load_model(run)
    assert (
        model.encoder.hidden_size == 16 and model.task.head.output.in_features == 16 if task != "pretraining" else True
    )
    record = asked(run, tmp_path / "answer", first_image(run), QUESTIONS[task][0], *QUESTIONS[task][1])
    kind = {"refcoco": "box", "vqa": "top_answers", "vcr": "probabilities", "pretraining": "masks"}[task]
    assert record[kind]
    assert task != "pretraining" or [len(record["masks"]), len(record["masked_regions"])] == [1, 1]
    assert task == "refcoco" or len(record["attention"]) == len(record["regions"]) > 0
    assert task == "refcoco" or sum(record["attention"]) > 0  # of the last map that has one


def test_an_encoder_that_lacks_an_ability_is_refused(settings, monkeypatch):
    monkeypatch.setitem(parts.ENCODERS, "pooled", Part(pooled_encoder.PooledSettings, pooled_encoder.PooledEncoder))
    monkeypatch.setitem(parts.DATASETS, "pairs", Part(NoOptions, image_pairs.PairDataset))
    monkeypatch.setitem(parts.TASKS, "statements", Part(statements.StatementConfig, statements.StatementTask))
    message = r"The task statements needs an encoder with a way to tell the images of one text apart; choose another"
    with pytest.raises(ValueError, match=message):
        build_run(settings("data.name=pairs", "task.name=statements", encoder=POOLED))
    with pytest.raises(ValueError, match=r"max_images to 2"):
        build_run(settings("data.name=pairs", "task.name=statements"))


# A task with two images per text


def test_a_task_about_two_images(settings, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(parts.DATASETS, "pairs", Part(NoOptions, image_pairs.PairDataset))
    monkeypatch.setitem(parts.TASKS, "statements", Part(statements.StatementConfig, statements.StatementTask))
    words = "data.name=pairs", "task.name=statements", "encoder.config.max_images=2", "train.lr=0.02"
    run = live(settings(*words, "eval.boxes=[gt,online]", task={"name": "statements", "config": {"dropout": 0.0}}))
    records = saved(run)
    assert len(records) == 8 and all(len(set(record["facts"]["image_ids"])) == 2 for record in records)

    config, model, tokenizer = load_model(run)
    data = build_examples(config, model, tokenizer, "val", boxes="gt")
    batch = build_collate(config, model)([data[Request(number, tuple(data.groups[number]))] for number in (0, 1)])
    assert batch.image_index.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    counts = [len(boxes) for boxes in batch.boxes]
    output = model(batch)
    of_pairs = [counts[0] + counts[1] + 2] * 2 + [counts[2] + counts[3] + 2] * 2  # with the images as a whole
    assert output.text_regions.attention_mask.sum(dim=1).tolist() == of_pairs
    swapped = model(dataclasses.replace(batch, image_index=batch.image_index.flip(1)))
    assert (output.task.logits - swapped.task.logits).abs().min() > 1e-4

    sample = data.dataset.sample(data.groups[0][:1])
    pair = tuple(image.file for image in sample.images)
    own = e2e_vl.load(run).ask(pair, sample.texts[0].words)
    assert own.lines[0].endswith("true") and set(own.box_images) == {0, 1}
    assert len(own.attention) == len(own.boxes) and 0 < own.attention.sum() < 1
    answered = asked(run, tmp_path / "answer", pair, sample.texts[0].words)
    assert answered["true"] == pytest.approx(own.prediction.true, abs=1e-5)
    assert answered["region_images"] == own.box_images.tolist() and answered["other_images"] == [str(pair[1])]
    assert is_picture(tmp_path / "answer" / "regions_2.png") and is_picture(tmp_path / "answer" / "answer_2.png")
    capsys.readouterr()
    message = refused(ask(run, pair[0], "both images hold a star"), capsys)
    assert "are about 2 images, and 1 is given; give 2 per text" in message
    message = refused(ask(run, pair, "both images hold a star", "--boxes", "1,2,30,40"), capsys)
    assert "Boxes of several images cannot be told apart" in message


def test_a_summary_of_another_width(settings, monkeypatch):
    """One vector per image, side by side: the summary is twice as wide as the states."""
    monkeypatch.setitem(parts.ENCODERS, "paired", Part(pooled_encoder.PooledSettings, pooled_encoder.PairedEncoder))
    monkeypatch.setitem(parts.DATASETS, "pairs", Part(NoOptions, image_pairs.PairDataset))
    monkeypatch.setitem(parts.TASKS, "statements", Part(statements.StatementConfig, statements.StatementTask))
    paired = {"name": "paired", "config": {"hidden_size": 16}}
    run = live(settings("data.name=pairs", "task.name=statements", encoder=paired))
    config, model, tokenizer = load_model(run)
    assert model.encoder.hidden_size == 16 and model.task.output.in_features == 32
    data = build_examples(config, model, tokenizer, "val", boxes="gt")
    batch = build_collate(config, model)([data[Request(0, tuple(data.groups[0]))]])
    swapped = dataclasses.replace(batch, image_index=batch.image_index.flip(1))
    first, second = model(batch).encoded.summary.chunk(2, dim=1)
    assert_same(model(swapped).encoded.summary.tolist(), torch.cat([second, first], dim=1).tolist())


class DataWithFacts(image_pairs.PairDataset):
    """The second text of each pair looks at no image."""

    def sample(self, texts: Sequence[int]) -> Sample:
        sample = super().sample(texts)
        own = [dataclasses.replace(text, image_index=() if text.index % 2 else (0, 1)) for text in sample.texts]
        return dataclasses.replace(sample, texts=tuple(own))


def test_texts_without_an_image_beside_texts_about_two(settings, monkeypatch):
    monkeypatch.setitem(parts.DATASETS, "facts", Part(NoOptions, DataWithFacts))
    monkeypatch.setitem(parts.TASKS, "statements", Part(statements.StatementConfig, statements.StatementTask))
    words = "data.name=facts", "encoder.config.max_images=2", "encoder.config.text_only_embedding=true"
    records = saved(live(settings(*words, task={"name": "statements", "config": {}})))
    assert ["file_name" in record for record in records] == [True, False] * 4


# A task with ragged targets


def test_a_task_with_several_boxes_for_each_of_several_phrases(settings, monkeypatch, tmp_path):
    monkeypatch.setitem(parts.DATASETS, "phrases", Part(NoOptions, phrases.PhraseDataset))
    monkeypatch.setitem(parts.TASKS, "grounding", Part(grounding.GroundingConfig, grounding.GroundingTask))
    run = live(settings("data.name=phrases", "task.name=grounding", "data.workers=1"))
    records = saved(run)
    assert len({len(record["phrases"]) for record in records}) > 1
    assert len({len(boxes) for record in records for boxes in record["gt_boxes"]}) > 2
    for record in records:
        assert " and ".join(record["phrases"]) == record["text"]
        assert len(record["boxes"]) == len(record["phrases"]) == len(record["gt_boxes"])

    config, model, tokenizer = load_model(run)
    data = build_examples(config, model, tokenizer, "train", boxes="gt", training=True)
    batch = build_collate(config, model)([data[Request(number, (number,))] for number in range(4)])
    targets = batch.targets
    assert {record["flipped"] for record in batch.records} == {False, True}
    phrase = iter(targets.boxes.split())
    for number, spans in enumerate(targets.spans.split()):
        words = [tokenizer.decode(batch.texts.input_ids[number, first:last]) for first, last in spans.tolist()]
        record = batch.records[number]
        mirrored = [" ".join(swap_left_right(one.split())) for one in record["phrases"]]
        assert words == (mirrored if record["flipped"] else record["phrases"])
        truth = [len(boxes) for boxes in record["gt_boxes"]]
        assert [len(next(phrase)) for _ in words] == truth
    assert next(phrase, None) is None
    told = asked(run, tmp_path / "answer", first_image(run), "the circle")
    assert told["phrases"] == ["the circle"] and told["boxes"][0] in told["regions"]


# A reader whose ids are no numbers


def test_a_reader_with_names_as_ids(settings, monkeypatch, tmp_path):
    monkeypatch.setitem(parts.DATASETS, "named_scenes", Part(NoOptions, named_scenes.NamedSceneDataset))
    words = "data.name=named_scenes", "data.files.detections=found.json"
    config = settings(*words, "data.boxes.train=detections+gt", "eval.boxes=[gt,detections]")
    make_synthetic_data(config)
    found = [
        {"image_id": f"scene-{one['image_id']}.b", "box": one["bbox"], "category_id": 1, "score": 0.9}
        for split in ("train", "val")
        for one in json.loads((Path(config.data.root) / f"detection/instances_{split}.json").read_text())["annotations"]
    ]
    (Path(config.data.root) / "found.json").write_text(json.dumps(found))
    run = live(config)
    records = saved(run)
    assert all(record["image_id"].startswith("scene-") for record in records)
    assert {record["facts"]["expression_id"] for record in records} == {f"{record['image_id']}/0" for record in records}
    for one, other in zip(records, saved(run, "predictions_val_detections.json"), strict=True):
        np.testing.assert_allclose(one["candidate_boxes"], other["candidate_boxes"], atol=1e-3)
    record = asked(run, tmp_path / "answer", first_image(run), "the first circle")
    assert record["box"] in record["regions"]


def test_names_as_ids_in_a_file_of_features(settings, monkeypatch):
    monkeypatch.setitem(parts.DATASETS, "named_scenes", Part(NoOptions, named_scenes.NamedSceneDataset))
    config = settings(
        *("data.name=named_scenes", "data.files.features=features", "data.flip=0"),
        *("detector.backend=precomputed", "data.boxes.train=precomputed", "eval.boxes=[precomputed]"),
        "eval.report_pictures=0",
    )
    make_synthetic_data(config)
    folder = Path(config.data.root) / "features"
    folder.mkdir()
    width = build.build_detector(config).feature_dim
    for split in ("train", "val"):
        files, options = open_options(named_scenes.NamedSceneDataset, config.data)
        data = named_scenes.NamedSceneDataset(files, options, split, DataNeeds())
        for index, name in enumerate(data.names):
            [image] = data.sample([index]).images
            boxes = image.objects.boxes.astype(np.float32)
            features = np.random.default_rng(index).random((len(boxes), width), dtype=np.float32)
            save_npz(
                folder / f"{name}.npz", RegionFeatures(name, image.size, boxes, features, image_feature=features[0])
            )
    assert all(
        record["image_id"].startswith("scene-") for record in saved(live(config), "predictions_val_precomputed.json")
    )


# An objective of pre-training


def test_an_objective(settings, monkeypatch, tmp_path):
    entry = Part(region_features.RegionFeaturesConfig, region_features.RegionFeatures)
    monkeypatch.setitem(parts.OBJECTIVES, "region_features", entry)
    pretraining = ROOT / "configs" / "tiny" / "pretraining.yaml"
    words = "task.config.region_probability=0.5", "task.config.objectives.region_features={weight: 2.0}"
    run = live(settings(*words, config=pretraining))
    lines = [line for line in read_log(run / "log.jsonl") if line["kind"] == "train"]
    assert all(line["region_features"] > 0 and line["masked_regions"] > 0 for line in lines)
    metrics = json.loads((run / "metrics.json").read_text())
    assert 0 <= metrics["val/region_features_gt_boxes"] <= 1
    record = asked(run, tmp_path / "answer", first_image(run), "a [MASK] circle", "--hide", "5,6,40,50")
    assert (
        len(record["facts"]["feature_norms"]) == len(record["masked_regions"]) == 1
        and record["facts"]["feature_norms"][0] > 0
    )
    others = build.build_task(settings(config=pretraining), Sizes(hidden_size=8, vocab_size=9, feature_dim=7))
    assert "region_features" not in others.objectives and {"masked_words", "relationship"} <= set(others.objectives)


def test_an_objective_alone(settings, monkeypatch, tmp_path):
    """Nothing of the other objectives is left: no word head, and nothing to say but its own lines."""
    entry = Part(region_features.RegionFeaturesConfig, region_features.RegionFeatures)
    monkeypatch.setitem(parts.OBJECTIVES, "region_features", entry)
    monkeypatch.setitem(parts.ENCODERS, "pooled", Part(pooled_encoder.PooledSettings, pooled_encoder.PooledEncoder))
    weights = "{masked_words: 0, masked_text: 0, masked_regions: 0, relationship: 0, region_features: 1}"
    words = "task.config.region_probability=0.5", f"task.config.objectives={weights}"
    run = live(settings(*words, encoder=POOLED, config=ROOT / "configs" / "tiny" / "pretraining.yaml"))
    _, model, _ = load_model(run)
    assert {name.split(".")[0] for name in model.task.state_dict()} == {"region_features"}
    record = asked(run, tmp_path / "answer", first_image(run), "a circle", "--hide", "5,6,40,50")
    assert len(record["facts"]["feature_norms"]) == 1


def test_an_objective_on_saved_features(settings, monkeypatch, tmp_path):
    """The features to be predicted come from the file."""
    entry = Part(region_features.RegionFeaturesConfig, region_features.RegionFeatures)
    monkeypatch.setitem(parts.OBJECTIVES, "region_features", entry)
    frcnn = "conceptual/{split}_frcnn.json"
    config = settings(
        "data.config.source=json_lines",
        f"data.files={{captions: 'conceptual/{{split}}.json', features: '{frcnn}'}}",
        *("detector.backend=precomputed", "data.boxes.train=precomputed", "eval.boxes=[precomputed]", "data.flip=0"),
        "detector.overrides.MODEL.RESNETS={RES2_OUT_CHANNELS: 4, WIDTH_PER_GROUP: 4}",  # features are 32 wide
        *("task.config.teacher=file", "task.config.mask_pixels=false", "encoder.config.masked_region_feature=true"),
        *("task.config.region_probability=0.5", "task.config.objectives.region_features=1", "eval.report_pictures=0"),
        config=ROOT / "configs" / "tiny" / "pretraining.yaml",
    )
    run = build_run(msgspec.structs.replace(config, output=str(tmp_path / "built")))
    data = run.train_data
    batch = run.collate([data[Request(number, tuple(data.groups[number]))] for number in range(2)])
    output = run.model(batch)
    for one, other in zip(output.batch.region_labels.features, batch.images.precomputed.features, strict=True):
        assert torch.equal(one, other)
    assert output.task.losses["region_features"].count > 0
    live(config)

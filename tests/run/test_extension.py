"""What CONTRIBUTING.md promises: an extension is one module (in `extensions/`) and one entry of a registry.

Nothing else changes. Every extension is trained, resumed, evaluated and asked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import e2e_vl
from detector.checkpoint import load_checkpoint
from detector.config import BACKBONES, BackboneEntry
from detector.errors import UserError
from e2e_vl import registry
from e2e_vl.cli import main as tool
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request, collate
from e2e_vl.data.config import NoDatasetConfig
from e2e_vl.io import read_log
from e2e_vl.registry import Entry
from e2e_vl.run.build import build_examples, build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.compilation import compile_blocks
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.cli.calls import ask, first_image, is_picture, refused
from tests.run.extensions import conv_next, image_pairs, pooled_encoder, region_features, statements
from tests.run.runs import ROOT, SHORT, TINY_DETECTOR, first_texts, lose_newest, predictions_of
from tests.same import assert_same

TINY = ROOT / "tests" / "run" / "extensions" / "tiny.yaml"
REFCOCO = ROOT / "configs" / "tiny" / "refcoco.yaml"
SCENES = "data.synthetic.scenes={train: 8, val: 4}"
CONV_NEXT = (  # keys of the detector
    "BACKBONE: {NAME: build_small_conv_next_fpn, FREEZE_AT: 0}, RESNETS: {NORM: FrozenBN}, "
    "FPN: {IN_FEATURES: [res2, res3, res4]}, ANCHOR_GENERATOR: {SIZES: [[16], [32], [64], [96]]}, "
    "RPN: {IN_FEATURES: [p2, p3, p4, p5], POST_NMS_TOPK_TEST: 12}, "
    "ROI_HEADS: {NAME: StandardROIHeads, IN_FEATURES: [p2, p3, p4], SCORE_THRESH_TEST: 0.0}, "
    "ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_FC: 1, FC_DIM: 16}"
)
POOLED = {"name": "pooled", "config": {"hidden_size": 16}}

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Callable[..., RunConfig]:
    pooled = Entry(pooled_encoder.PooledEncoderConfig, pooled_encoder.PooledEncoder)
    monkeypatch.setitem(registry.ENCODERS, "pooled", pooled)
    monkeypatch.setitem(registry.DATASETS, "pairs", Entry(NoDatasetConfig, image_pairs.PairDataset))
    monkeypatch.setitem(registry.TASKS, "statements", Entry(statements.StatementConfig, statements.StatementTask))
    objective = Entry(region_features.RegionFeaturesConfig, region_features.RegionFeatures)
    monkeypatch.setitem(registry.OBJECTIVES, "region_features", objective)
    backbone = BackboneEntry(conv_next.ConvNeXtFPNSpec(), conv_next.ConvNeXtFPN)
    monkeypatch.setitem(BACKBONES, "build_small_conv_next_fpn", backbone)

    def make(*words: str, config: Path = TINY, **sections: dict) -> RunConfig:
        places = TINY_DETECTOR, f"data.root={tmp_path / 'data'}", f"output={tmp_path / 'run'}"
        loaded = load_config(config, [*places, *SHORT, *words])
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
    for boxes in config.eval.boxes:
        again, path = evaluate_run(run, split="val", boxes=boxes, output=run / "again.json")
        assert again
        assert_same(again, {name: metrics[name] for name in again})
        assert_same(json.loads(path.read_text()), predictions_of(run, f"val_{boxes}"))
    return run


def asked(run: Path, folder: Path, image: Path | tuple[Path, ...], text: str, *more: object) -> dict:
    assert tool.main(ask(run, image, text, *more, "--output", folder)) == 0
    assert is_picture(folder / "regions.png") and is_picture(folder / "answer.png")
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize(
    ("task", "kind", "question"),
    [
        ("vqa", "top_answers", ("what color is the circle?",)),
        ("pretraining", "masks", ("a [MASK] circle", "--mask", "5,6,40,50")),
    ],
)
def test_an_encoder(settings, tmp_path, task, kind, question):
    run = live(settings(SCENES, config=ROOT / "configs" / "tiny" / f"{task}.yaml", encoder=POOLED))
    _, model, _ = load_model(run)
    assert model.encoder.hidden_size == 16
    record = asked(run, tmp_path / "answer", first_image(run), *question)
    assert record[kind]
    assert len(record["attention"]) == len(record["regions"]) and sum(record["attention"]) > 0


def test_an_encoder_that_lacks_an_ability_is_refused(settings):
    with pytest.raises(ValueError, match=r"The task statements needs an encoder"):
        build_run(settings("data.name=pairs", "task.name=statements", encoder=POOLED))
    with pytest.raises(ValueError, match=r"max_images to 2"):
        build_run(settings("data.name=pairs", "task.name=statements"))


def test_a_data_set_and_a_task_about_two_images(settings, tmp_path, capsys):
    words = "data.name=pairs", "task.name=statements", "encoder.config.max_images=2", "train.lr=0.02"
    run = live(settings(*words, "eval.boxes=[gt,online]", task={"name": "statements", "config": {"dropout": 0.0}}))
    records = predictions_of(run)
    assert len(records) == 8 and all(len(set(record["metadata"]["image_ids"])) == 2 for record in records)

    config, model, tokenizer = load_model(run)
    data = build_examples(config, model, tokenizer, "val", boxes="gt")
    batch = collate([data[Request(number, tuple(data.groups[number]))] for number in (0, 1)])
    assert batch.image_index.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    counts = [len(boxes) for boxes in batch.boxes]
    output = model(batch)
    of_pairs = [counts[0] + counts[1] + 2] * 2 + [counts[2] + counts[3] + 2] * 2  # with the images as a whole
    assert output.text_regions.attention_mask.sum(dim=1).tolist() == of_pairs
    swapped = model(dataclasses.replace(batch, image_index=batch.image_index.flip(1)))
    assert (output.task.logits - swapped.task.logits).abs().min() > 1e-5

    sample = data.dataset.sample(data.groups[0][:1])
    pair = tuple(image.file for image in sample.images)
    own = e2e_vl.load(run).ask(pair, sample.texts[0].words)
    assert own.lines[0].endswith("true") and set(own.box_images) == {0, 1}
    answered = asked(run, tmp_path / "answer", pair, sample.texts[0].words)
    assert answered["true"] == pytest.approx(own.prediction.true, abs=1e-5)
    assert answered["region_images"] == own.box_images.tolist() and answered["other_images"] == [str(pair[1])]
    capsys.readouterr()
    assert "are about 2 images, and 1 is given" in refused(ask(run, pair[0], "both images hold a star"), capsys)


def test_an_objective(settings, tmp_path):
    """Alone: nothing of the other objectives is left."""
    weights = "{masked_words: 0, masked_text: 0, masked_regions: 0, relationship: 0, region_features: 2}"
    words = SCENES, "task.config.region_probability=0.5", f"task.config.objectives={weights}"
    run = live(settings(*words, config=ROOT / "configs" / "tiny" / "pretraining.yaml"))
    assert all(line["region_features"] > 0 for line in read_log(run / "log.jsonl") if line["kind"] == "train")
    assert 0 <= json.loads((run / "metrics.json").read_text())["val/region_features_gt_boxes"] <= 1
    assert {name.split(".")[0] for name in load_model(run)[1].task.state_dict()} == {"region_features"}
    record = asked(run, tmp_path / "answer", first_image(run), "a circle", "--mask", "5,6,40,50")
    assert len(record["metadata"]["feature_norms"]) == 1


def with_conv_next(freeze_at: int = 0, norm: str = "FrozenBN") -> tuple[str, ...]:
    """Return settings of a detector with the small ConvNeXt, trained with its detection losses."""
    keys = CONV_NEXT.replace("FREEZE_AT: 0", f"FREEZE_AT: {freeze_at}").replace("NORM: FrozenBN", f"NORM: {norm}")
    return SCENES, f"detector.overrides.MODEL={{{keys}}}", "detector.loss_weight=1"


def test_a_backbone(settings, tmp_path):
    words = "eval.boxes=[gt,online]", "train.activation_checkpointing=true"
    config = settings(*with_conv_next(), *words, config=REFCOCO)
    run = live(config)
    trained = load_model(run)[1].detector
    assert type(trained.backbone).__name__ == "ConvNeXtFPN"
    assert asked(run, tmp_path / "answer", first_image(run), "the red circle")["regions"]

    started = build_run(msgspec.structs.replace(config, output=str(tmp_path / "started"))).model.detector
    report = load_checkpoint(started, run / "model" / "detector", expect="backbone")
    loaded = {name for name in started.state_dict() if name not in report.missing}
    assert loaded == {f"backbone.bottom_up.{name}" for name in started.backbone.bottom_up.state_dict()}
    weights = started.backbone.bottom_up.state_dict()
    torch.testing.assert_close(weights, trained.backbone.bottom_up.state_dict(), rtol=0, atol=0)


def test_the_task_trains_the_first_layer_of_a_backbone(settings):
    run = build_run(settings(*with_conv_next(), config=REFCOCO))
    batch = first_texts(run, images=2)
    gradients = []
    for is_recomputed in (False, True):
        if is_recomputed:
            run.model.recompute_activations()
        run.model.zero_grad()
        torch.manual_seed(0)  # of the sampled RoIs
        output = run.model(batch)
        sum(loss.mean for loss in output.task.losses.values()).backward()
        gradients.append(run.model.detector.backbone.bottom_up.stem[0].weight.grad.clone())
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_backbone_is_frozen_and_compiled(settings, monkeypatch):
    model = build_run(settings(*with_conv_next(freeze_at=2), config=REFCOCO)).model
    bottom_up = model.detector.backbone.bottom_up
    stages = (bottom_up.stem, bottom_up.res2, bottom_up.res3)
    assert [any(weight.requires_grad for weight in stage.parameters()) for stage in stages] == [False, False, True]

    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(type(self).__name__))
    compile_blocks(model)
    assert compiled.count("ConvNeXtBlock") == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"freeze_at": 5}, "FREEZE_AT 5 is more than the 4 stages"), ({"norm": "SyncBN"}, "NORM SyncBN is not supported")],
)
def test_what_a_backbone_cannot_follow_is_refused(settings, changes, message):
    with pytest.raises(UserError, match=message):
        build_run(settings(*with_conv_next(**changes), config=REFCOCO))

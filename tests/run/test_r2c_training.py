"""A run on VCR with the network of R2C and VisualBERT, from drawn scenes to a saved model and an official file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from e2e_vl.config import RunConfig, load_config
from e2e_vl.run.build import make_synthetic_data
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from e2e_vl.weights.visual_bert import OfficialVisualBert
from tests.data.drawn_metadata import write_metadata
from tests.run.runs import ROOT, tiny
from tests.weights.starts import options, replaced

NETWORK = {
    "RESNETS": {"STEM_OUT_CHANNELS": 8, "RES2_OUT_CHANNELS": 16, "WIDTH_PER_GROUP": 4},
    "R2C": {"FEATURE_DIM": 8, "MASK_CHANNELS": 4, "CLASS_DIM": 4, "CANVAS": [192, 192]},
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}

pytestmark = pytest.mark.usefixtures("on_cpu")


def detector_of(shipped: RunConfig, **more: object) -> dict:
    """The network of a published config, small."""
    backbone = shipped.detector.overrides.get("MODEL", {}).get("BACKBONE", {})
    return {
        "backend": shipped.detector.backend,
        "config": str(ROOT / "configs/detector/r2c_R_50.yaml"),
        "overrides": {"MODEL": NETWORK | {"BACKBONE": backbone}},
        "loss_weight": 0.0,
        "loss_weights": {},
        **more,
    }


def tiny_vcr(folder: Path, name: str, *words: str) -> RunConfig:
    common = ("train={max_steps: 1, warmup_steps: 0, schedule: constant}", "data={flip: 0, texts_per_image: 1}")
    return tiny("vcr", folder / "vcr", folder / name, *common, "eval={boxes: [gt], report_pictures: 0}", *words)


def test_a_step_with_the_shipped_settings(tmp_path):
    shipped = load_config(ROOT / "configs/vcr/visual_bert_q2a.yaml", ["data.root=DATA"])
    config = replaced(
        tiny_vcr(tmp_path, "run", "data.config.objects=r2c_all_texts"),
        detector=detector_of(shipped, weights=None),
        encoder={"name": shipped.encoder.name, "config": options(shipped.encoder.config) | SMALL},
        task={"config": shipped.task.config},
    )
    metrics = train(config)
    assert 0 <= metrics["val/accuracy_gt_boxes"] <= 1
    _, model, _ = load_model(tmp_path / "run")
    assert type(model.detector).__name__ == "R2CNetwork"
    assert OfficialVisualBert().export(model, "vcr", tmp_path / "x.th") == []
    state = torch.load(tmp_path / "x.th", weights_only=True)
    assert {"bert.classifier.weight", "detector.object_embed.weight"} <= state.keys()


def test_the_first_phase_trains_the_network_and_the_next_goes_on_with_it(tmp_path):
    """COCO's captions with objects of a detector of VCR's classes; res5 and what follows learn, res4 does not."""
    shipped = load_config(ROOT / "configs/pretraining/visual_bert_coco_vcr.yaml", ["data.root=DATA"])
    data, metadata = tmp_path / "data", tmp_path / "metadata"
    words = ("train={max_steps: 2, warmup_share: 0}", "eval.report_pictures=0")
    drawn = tiny("visual_bert_pretraining", data, tmp_path / "run", *words)
    config = replaced(
        drawn,
        detector=detector_of(shipped),
        encoder={"config": options(drawn.encoder.config) | {"uses_whole_image": True}},
        task={"config": shipped.task.config},
        data={
            "config": options(shipped.data.config) | {"min_object_score": 0.15},
            "files": {key: drawn.data.files[key] for key in ("images", "captions")} | {"metadata": str(metadata)},
        },
    )
    make_synthetic_data(drawn)
    metadata.mkdir()
    for split in ("train", "val"):
        write_metadata(data / f"detection/instances_{split}.json", metadata)
    metrics = train(config)
    assert {"val/masked_words_gt_boxes", "val/relationship_gt_boxes"} <= set(metrics)
    _, model, _ = load_model(tmp_path / "run")
    assert type(model.detector).__name__ == "R2CNetwork" and model.task.mask_size == 14

    before = model.detector.state_dict()
    tuned = replaced(
        tiny_vcr(tmp_path, "tuned", "detector.freeze=true"),
        detector=detector_of(shipped, weights=str(tmp_path / "run")),
        encoder={"name": "visual_bert", "config": SMALL | {"uses_whole_image": True}},
        task={"config": {"mask_size": 14}},
    )
    train(tuned)
    after = load_model(tmp_path / "tuned")[1].detector.state_dict()
    kept = [name for name in before if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)

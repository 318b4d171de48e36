"""A run on a backbone of transformers starts from published weights, resumes bit for bit, and loads without them."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import SwinConfig, SwinForImageClassification, ViTImageProcessor

from detector.errors import UserError
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.run.build import build_run
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from tests.run.runs import ROOT, SHORT, TINY_DETECTOR, assert_same_run, lose_newest

SWIN = {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 2], "window_size": 4}
MODEL = (
    "BACKBONE: {NAME: build_transformers_fpn_backbone, FREEZE_AT: 1}, TRANSFORMERS_BACKBONE: {NAME: FOLDER}, "
    "RESNETS: {DEPTH: 50, NORM: FrozenBN, STEM_OUT_CHANNELS: 64, RES2_OUT_CHANNELS: 256, WIDTH_PER_GROUP: 64, "
    "STRIDE_IN_1X1: true}, FPN: {IN_FEATURES: [res2, res3, res4, res5], OUT_CHANNELS: 8}, "
    "PIXEL_MEAN: [127.5, 127.5, 127.5], PIXEL_STD: [51, 51, 51], "
    "ANCHOR_GENERATOR: {SIZES: [[24], [36], [52], [80], [120]]}, "
    "RPN: {IN_FEATURES: [p2, p3, p4, p5, p6], POST_NMS_TOPK_TRAIN: 24, POST_NMS_TOPK_TEST: 12}, "
    "ROI_HEADS: {NAME: StandardROIHeads, IN_FEATURES: [p2, p3, p4, p5], BATCH_SIZE_PER_IMAGE: 12}, "
    "ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_FC: 1, FC_DIM: 16}"
)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def settings(tmp_path: Path) -> RunConfig:
    torch.manual_seed(5)
    folder = tmp_path / "swin"
    SwinForImageClassification(SwinConfig(**SWIN)).save_pretrained(folder)
    ViTImageProcessor(image_mean=[0.5, 0.5, 0.5], image_std=[0.2, 0.2, 0.2]).save_pretrained(folder)
    words = (
        f"detector.overrides.MODEL={{{MODEL.replace('FOLDER', str(folder))}}}",
        "detector.overrides.INPUT={FORMAT: RGB}",
        "data.synthetic.scenes={train: 8, val: 4}",
        f"data.root={tmp_path / 'data'}",
        f"output={tmp_path / 'run'}",
    )
    return load_config(ROOT / "configs" / "tiny" / "refcoco.yaml", [TINY_DETECTOR, *SHORT, *words])


def test_a_run_starts_from_published_weights_resumes_and_loads_without_them(settings: RunConfig, tmp_path: Path):
    published = SwinForImageClassification.from_pretrained(tmp_path / "swin").state_dict()
    started = build_run(msgspec.structs.replace(settings, output=str(tmp_path / "started")))
    [initial] = started.initial_weights
    assert (initial.path, initial.report.layout) == (str(tmp_path / "swin"), "transformers")
    name = "swin.encoder.layers.2.blocks.1.mlp.fc1.weight"
    state = started.model.detector.backbone.bottom_up.network.state_dict()
    torch.testing.assert_close(state[name], published[name], rtol=0, atol=0)

    random = msgspec.structs.replace(settings.detector, backbone_weights=False)
    bare = build_run(msgspec.structs.replace(settings, detector=random, output=str(tmp_path / "bare")))
    assert bare.initial_weights == []
    assert not torch.equal(bare.model.detector.backbone.bottom_up.network.state_dict()[name], published[name])

    train(settings)
    resumed = msgspec.structs.replace(settings, output=f"{settings.output}_resumed")
    lose_newest(Path(settings.output), Path(resumed.output))
    train(resumed, resume=True)
    assert_same_run(settings.output, resumed.output)

    shutil.rmtree(tmp_path / "swin")
    trained = load_model(Path(settings.output))[1].detector.backbone.bottom_up.network
    assert not torch.equal(trained.state_dict()[name], published[name])
    stem = "swin.embeddings.patch_embeddings.projection.weight"  # FREEZE_AT 1
    torch.testing.assert_close(trained.state_dict()[stem], published[stem], rtol=0, atol=0)


def test_settings_say_which_folder_is_missing(settings: RunConfig, tmp_path: Path):
    shutil.rmtree(tmp_path / "swin")
    with pytest.raises(UserError, match=r"TRANSFORMERS_BACKBONE.NAME .*swin is neither a local folder"):
        build_run(settings)

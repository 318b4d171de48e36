"""Backbones of transformers, tiny and with random weights: their maps, pyramids, settings and published weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from transformers import AutoBackbone, AutoModelForImageClassification, ResNetConfig, SwinConfig, ViTImageProcessor

from detector.backbones.auto_backbone import SimpleFeaturePyramid, make_config, measure
from detector.backbones.base import blocks_to_compile
from detector.backbones.fpn import FPN
from detector.backbones.layers import FrozenBatchNorm2d
from detector.checkpoint import load_checkpoint, save_settings, save_weights
from detector.config import DetectorConfig, MapShape
from detector.errors import MissingFileError, UserError
from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch

ROOT = Path(__file__).parents[2]
STAGED = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
WINDOWED = {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 2], "window_size": 4, "drop_path_rate": 0.0}
VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {  # model type -> a name on the hub, settings of a tiny network
    "resnet": ("microsoft/resnet-50", {"embedding_size": 8, **STAGED}),
    "convnext": ("facebook/convnext-tiny-224", STAGED),
    "convnextv2": ("facebook/convnextv2-tiny-22k-224", STAGED),
    "swin": ("microsoft/swin-tiny-patch4-window7-224", WINDOWED),
    "swinv2": ("microsoft/swinv2-tiny-patch4-window8-256", {**WINDOWED, "image_size": 64}),
    "pvt_v2": ("OpenGVLab/pvt_v2_b0", {**STAGED, "num_attention_heads": [1, 2, 2, 2]}),
    "hgnet_v2": (
        "",
        {
            "stem_channels": [3, 8, 8],
            "embedding_size": 8,
            "hidden_sizes": [16, 24, 32, 40],
            "stage_in_channels": [8, 16, 24, 32],
            "stage_mid_channels": [8, 8, 8, 8],
            "stage_out_channels": [16, 24, 32, 40],
            "stage_num_blocks": [1, 1, 1, 1],
            "stage_numb_of_layers": [1, 1, 1, 1],
        },
    ),
    "dinov3_convnext": ("facebook/dinov3-convnext-tiny-pretrain-lvd1689m", STAGED),
    "dinov2": ("facebook/dinov2-base", {**VIT, "image_size": 56, "patch_size": 14}),
    "dinov2_with_registers": ("facebook/dinov2-with-registers-base", {**VIT, "image_size": 56, "patch_size": 14}),
    "dinov3_vit": (
        "facebook/dinov3-vitb16-pretrain-lvd1689m",
        {**VIT, "intermediate_size": 32, "patch_size": 16, "num_register_tokens": 2},
    ),
    "vitdet": ("", {**VIT, "image_size": 64, "window_block_indices": [0, 2], "window_size": 2}),
    "beit": ("microsoft/beit-base-patch16-224", {**VIT, "intermediate_size": 32, "image_size": 64}),
}
VITS = ("dinov2", "dinov2_with_registers", "dinov3_vit", "vitdet", "beit")
INPUT = {"FORMAT": "RGB"}
PIXELS = {"PIXEL_MEAN": [120.0, 110.0, 100.0], "PIXEL_STD": [60.0, 60.0, 60.0]}
STAGES = ["res2", "res3", "res4", "res5"]


def fpn_tree(network: dict[str, Any], freeze_at: int = 0, **model: Any) -> dict[str, Any]:
    """Return the keys of a detector with a pyramid on a network, given by keys of MODEL.TRANSFORMERS_BACKBONE."""
    levels = ["p2", "p3", "p4", "p5"]
    sections = {
        "BACKBONE": {"NAME": "build_transformers_fpn_backbone", "FREEZE_AT": freeze_at},
        "TRANSFORMERS_BACKBONE": network,
        "FPN": {"IN_FEATURES": STAGES, "OUT_CHANNELS": 8},
        "RPN": {"IN_FEATURES": [*levels, "p6"]},
        "ROI_HEADS": {"NAME": "StandardROIHeads", "IN_FEATURES": levels, "NUM_CLASSES": 3},
        "ROI_BOX_HEAD": {"NAME": "FastRCNNConvFCHead", "NUM_FC": 1, "FC_DIM": 8, "POOLER_RESOLUTION": 2},
    }
    return {"INPUT": INPUT, "MODEL": {**PIXELS, **sections, **model}}


def random_network(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"CONFIG": {"model_type": model_type, **NETWORKS.get(model_type, ("", {}))[1], **changes}}


def fpn_config(model_type: str, freeze_at: int = 0, **model: Any) -> DetectorConfig:
    return DetectorConfig.from_yaml(fpn_tree(random_network(model_type), freeze_at, **model))


def without_pixels(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys that an image processor states."""
    return {"MODEL": {key: value for key, value in tree["MODEL"].items() if key not in PIXELS}}


def transformers_maps(config: DetectorConfig, network: nn.Module, pixels: Tensor) -> list[Tensor]:
    """Return the maps of a network that transformers alone makes, with the same weights."""
    settings = make_config(config.transformers.config)
    settings.out_indices = network.config.out_indices
    other = AutoBackbone.from_config(settings)
    other.load_state_dict(network.state_dict())
    return list(other.train(network.training)(pixels).feature_maps)


@pytest.mark.parametrize("model_type", NETWORKS)
def test_a_network_has_the_maps_of_transformers_and_trains_to_its_first_layer(model_type: str, tmp_path: Path):
    torch.manual_seed(0)
    config = fpn_config(model_type)
    detector = FasterRCNN(config).eval()
    below = detector.backbone.bottom_up
    pixels = torch.randn(1, 3, 96, 160)
    resized = pixels
    if model_type.startswith("dinov2"):
        resized = F.interpolate(pixels, (84, 140), mode="bilinear", antialias=True)  # patches of 14 pixels
    maps = below(pixels)
    expected = transformers_maps(config, below.network, resized)
    assert list(maps) == (["res4"] if model_type in VITS else STAGES)
    for feature_map, other in zip(maps.values(), expected, strict=True):
        torch.testing.assert_close(feature_map, other)

    levels = detector.backbone(pixels)
    shapes = {name: MapShape(level.shape[1], 160 // level.shape[3]) for name, level in levels.items() if name != "p6"}
    assert shapes == {f"p{number}": MapShape(8, 2**number) for number in range(2, 6)}
    sum(level.square().sum() for level in levels.values()).backward()
    first = next(weight for weight in below.network.parameters() if weight.dim() == 4)
    assert first.grad.abs().max() > 0
    trained = [name for name, weight in detector.backbone.named_parameters() if weight.requires_grad]
    assert [name for name in trained if detector.backbone.get_parameter(name).grad is None] == []

    save_settings(detector, tmp_path)
    save_weights(detector.state_dict(), tmp_path / "model.safetensors")
    saved = DetectorConfig.from_yaml(tmp_path / "config.yaml")
    assert saved == config
    loaded = FasterRCNN(saved).eval()
    assert load_checkpoint(loaded, tmp_path).is_complete
    with torch.no_grad():
        torch.testing.assert_close(loaded.backbone(pixels), detector.backbone(pixels), rtol=0, atol=0)


@pytest.mark.parametrize(("model_type", "name", "cells"), [("swin", "res5", (4, 6)), ("dinov3_vit", "res4", (7, 11))])
def test_one_map_feeds_a_box_head_and_what_it_does_not_need_is_frozen(model_type: str, name: str, cells: tuple):
    sections = {
        "BACKBONE": {"NAME": "build_transformers_backbone", "FREEZE_AT": 0},
        "RESNETS": {"OUT_FEATURES": [name]},
        "RPN": {"IN_FEATURES": [name]},
        "ROI_HEADS": {"NAME": "StandardROIHeads", "IN_FEATURES": [name], "NUM_CLASSES": 3},
    }
    detector = FasterRCNN(fpn_config(model_type, **sections))
    sizes = torch.tensor([[100, 170]])
    images = ImageBatch(torch.randn(1, 3, 100, 170), sizes, sizes, ["image"])
    assert detector.features(images)[name].shape[-2:] == cells
    regions = detector(images, [torch.tensor([[5.0, 5, 60, 80]])])
    regions.features[0].sum().backward()
    weights = dict(detector.backbone.named_parameters())
    frozen = {key for key, weight in weights.items() if not weight.requires_grad}
    assert frozen == {key for key, weight in weights.items() if weight.grad is None} != set()


@torch.no_grad()
def test_a_simple_feature_pyramid_has_the_layers_of_vitdet():
    torch.manual_seed(0)
    config = fpn_config("dinov3_vit", FPN={"IN_FEATURES": STAGES, "OUT_CHANNELS": 8, "NORM": "LN"})
    model = FasterRCNN(config).backbone.eval()
    assert isinstance(model, SimpleFeaturePyramid)
    pixels = torch.randn(1, 3, 64, 96)
    x = model.bottom_up(pixels)["res4"]
    levels = model(pixels)
    weights = {name: value for name, value in model.state_dict().items() if name.startswith("simfp_2.")}
    assert {name: list(value.shape) for name, value in weights.items()} == {
        "simfp_2.0.weight": [16, 8, 2, 2],
        "simfp_2.0.bias": [8],
        "simfp_2.1.weight": [8],
        "simfp_2.1.bias": [8],
        "simfp_2.3.weight": [8, 4, 2, 2],
        "simfp_2.3.bias": [4],
        "simfp_2.4.weight": [8, 4, 1, 1],
        "simfp_2.4.norm.weight": [8],
        "simfp_2.4.norm.bias": [8],
        "simfp_2.5.weight": [8, 8, 3, 3],
        "simfp_2.5.norm.weight": [8],
        "simfp_2.5.norm.bias": [8],
    }

    def norm(maps: Tensor) -> Tensor:
        return F.layer_norm(maps.permute(0, 2, 3, 1), maps.shape[1:2], eps=1e-6).permute(0, 3, 1, 2)

    def project(maps: Tensor, level: str, first: int) -> Tensor:
        lateral, output = (model.get_parameter(f"simfp_{level}.{first + index}.weight") for index in (0, 1))
        return norm(F.conv2d(norm(F.conv2d(maps, lateral)), output, padding=1))

    upper = F.conv_transpose2d(x, weights["simfp_2.0.weight"], weights["simfp_2.0.bias"], stride=2)
    upper = F.conv_transpose2d(F.gelu(norm(upper)), weights["simfp_2.3.weight"], weights["simfp_2.3.bias"], stride=2)
    torch.testing.assert_close(levels["p2"], project(upper, "2", 4))
    torch.testing.assert_close(levels["p4"], project(x, "4", 0))
    torch.testing.assert_close(levels["p5"], project(F.max_pool2d(x, 2), "5", 1))
    torch.testing.assert_close(levels["p6"], levels["p5"][..., ::2, ::2])


# Which layers train


def frozen_parts(model_type: str, freeze_at: int) -> set[str]:
    network = FasterRCNN(fpn_config(model_type, freeze_at)).backbone.bottom_up.network
    names = [name for name, weight in network.named_parameters() if not weight.requires_grad]
    return {".".join(name.split(".")[: 4 if "encoder" in name else 2]) for name in names}


def test_stages_are_frozen_by_number():
    unused = {"swin.layernorm"}
    assert frozen_parts("swin", 0) == unused
    assert frozen_parts("swin", 1) == {*unused, "swin.embeddings"}
    assert frozen_parts("swin", 3) == {*unused, "swin.embeddings", "swin.encoder.layers.0", "swin.encoder.layers.1"}
    assert frozen_parts("dinov3_vit", 0) == {"embeddings.mask_token"}
    network = FasterRCNN(fpn_config("dinov3_vit", 2)).backbone.bottom_up.network
    assert not any(weight.requires_grad for weight in network.embeddings.parameters())
    assert [any(w.requires_grad for w in layer.parameters()) for layer in network.model.layer] == [False, *[True] * 3]
    for model_type in ("resnet", "dinov2"):
        whole = FasterRCNN(fpn_config(model_type, 5)).backbone.bottom_up
        assert not any(weight.requires_grad for weight in whole.parameters())


def test_batch_norms_are_fixed_or_trained():
    fixed = FasterRCNN(fpn_config("resnet")).backbone.bottom_up
    trained = FasterRCNN(fpn_config("resnet", 2, RESNETS={"NORM": "BN"})).backbone.bottom_up
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fixed.modules())
    stages = trained.network.encoder.stages
    for part, kind in ((trained.network.embedder, FrozenBatchNorm2d), (stages[0], FrozenBatchNorm2d)):
        assert any(isinstance(module, kind) for module in part.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in stages[1].modules())


@pytest.mark.parametrize("model_type", ["swin", "dinov3_vit", "pvt_v2"])
def test_recomputed_activations_change_no_gradient(model_type: str):
    torch.manual_seed(0)
    detector = FasterRCNN(fpn_config(model_type)).train()
    pixels = torch.randn(1, 3, 64, 64)
    gradients = []
    layer = blocks_to_compile(detector, detector.backbone)[0]
    calls = []
    for is_recomputed in (False, True):
        if is_recomputed:
            detector.recompute_activations()
            layer.register_forward_pre_hook(lambda *_: None)
            inner = next(module for module in layer.modules() if isinstance(module, nn.LayerNorm))
            inner.register_forward_hook(lambda *_: calls.append(1))
        detector.zero_grad()
        torch.manual_seed(1)  # of the positions of DINOv3
        sum(level.square().sum() for level in detector.backbone(pixels).values()).backward()
        gradients.append({name: w.grad.clone() for name, w in detector.named_parameters() if w.grad is not None})
    assert len(calls) >= 2  # forward, and again in the backward pass
    torch.testing.assert_close(*gradients)


def test_layers_are_compiled_and_a_network_without_marked_layers_is_not_recomputed():
    swin = FasterRCNN(fpn_config("swin"))
    assert [type(block).__name__ for block in swin.blocks_to_compile()] == ["SwinLayer"] * 5
    conv_next = FasterRCNN(fpn_config("convnext"))
    assert [type(block).__name__ for block in conv_next.blocks_to_compile()] == ["ConvNextStage"] * 4
    with pytest.raises(UserError, match=r"no activation checkpointing for convnext; set train.activation_"):
        conv_next.recompute_activations()
    with pytest.raises(UserError, match=r"running statistics of batch norms twice per batch"):
        FasterRCNN(fpn_config("pp_lcnet", RESNETS={"NORM": "BN"})).recompute_activations()


# Published weights and image processors


def publish(folder: Path, config: SwinConfig | ResNetConfig, *, has_processor: bool = True) -> Path:
    """Save a classifier with random weights as it would be on the hub."""
    torch.manual_seed(3)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    if has_processor:
        ViTImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config_class", [SwinConfig, ResNetConfig])
def test_a_folder_gives_settings_pixels_and_weights(config_class: type, tmp_path: Path):
    config = config_class(**NETWORKS[config_class.model_type][1])
    folder = publish(tmp_path / "published", config)
    tree = without_pixels(fpn_tree({"NAME": str(folder)}))
    read = DetectorConfig.from_yaml(tree)
    assert read.input.format == "RGB"
    assert read.input.pixel_mean == pytest.approx((127.5, 102, 76.5))
    assert read.input.pixel_std == pytest.approx((51, 76.5, 102))
    assert measure(read.transformers.config) == measure(fpn_config(config.model_type).transformers.config)

    detector = FasterRCNN(read)
    report = detector.backbone.load_published_weights()
    assert not report.unexpected and all(name.startswith("hidden_states_norms.") for name in report.missing)
    classifier = AutoModelForImageClassification.from_pretrained(folder)
    weights = {name.removeprefix("resnet."): value for name, value in classifier.state_dict().items()}
    state = detector.backbone.bottom_up.network.state_dict()
    for name in report.matched:
        torch.testing.assert_close(state[name], weights[name], rtol=0, atol=0)
    assert DetectorConfig.from_yaml(yaml.safe_load(read.to_yaml())) == read
    assert FasterRCNN(fpn_config("swin")).backbone.load_published_weights() is None


def test_settings_of_a_published_network_may_be_changed(tmp_path: Path):
    folder = publish(tmp_path / "published", SwinConfig(**WINDOWED))
    tree = without_pixels(fpn_tree({"NAME": str(folder), "CONFIG": {"drop_path_rate": 0.3}}))
    settings = DetectorConfig.from_yaml(tree).transformers.config
    assert (settings["drop_path_rate"], settings["embed_dim"], settings["model_type"]) == (0.3, 8, "swin")
    tree["MODEL"]["TRANSFORMERS_BACKBONE"]["CONFIG"] = {"embed_dim": 16}
    detector = FasterRCNN(DetectorConfig.from_yaml(tree))
    with pytest.raises(UserError, match=r"does not fit MODEL.TRANSFORMERS_BACKBONE.CONFIG"):
        detector.backbone.load_published_weights()


def test_the_shipped_swin_t_takes_any_other_name(tmp_path: Path):
    """Its hub cannot be asked here: a Swin-T without weights is saved in a folder, whose name overrides the hub's."""
    SwinConfig(depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]).save_pretrained(tmp_path)
    ViTImageProcessor(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]).save_pretrained(tmp_path)
    network = {"TRANSFORMERS_BACKBONE": {"NAME": str(tmp_path)}}
    config = DetectorConfig.from_yaml({"_BASE_": "configs/detector/swin_T_FPN.yaml", "MODEL": network})
    channels = {name: shape.channels for name, shape in measure(config.transformers.config).maps.items()}
    assert channels == {"res2": 96, "res3": 192, "res4": 384, "res5": 768}
    assert config.input.pixel_mean == pytest.approx((123.675, 116.28, 103.53))
    with torch.device("meta"):
        assert isinstance(FasterRCNN(config).backbone, FPN)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = (
        r"^MODEL.TRANSFORMERS_BACKBONE.NAME nobody/nothing is neither a local folder of a network nor "
        r"one that could be loaded from the hub \(.+\); check the name and the connection, or download it and give its "
        r"folder\.$"
    )
    with pytest.raises(MissingFileError, match=message):
        DetectorConfig.from_yaml(fpn_tree({"NAME": "nobody/nothing"}))


# What cannot be followed

BOX_HEAD = {"ROI_HEADS": {"NAME": "StandardROIHeads", "IN_FEATURES": ["res4"]}, "RPN": {"IN_FEATURES": ["res4"]}}


@pytest.mark.parametrize(
    ("network", "model", "message"),
    [
        ({"CONFIG": {"model_type": "bert"}}, {}, "transformers has no backbone of the model_type 'bert'"),
        (random_network("swin", embed_dims=8), {}, "embed_dims is not a setting of swin here. Did you mean embed_dim?"),
        (random_network("swin", out_features=["stage1"]), {}, "out_features is not a setting of swin here"),
        (random_network("swin", depths="two"), {}, r"swin refuses its settings \(.*depths"),
        ({"CONFIG": {"embed_dim": 8}}, {}, "needs the name of a network, or .*CONFIG the model_type"),
        ({"WEIGHTS": "a"}, {}, "TRANSFORMERS_BACKBONE.WEIGHTS is not a known key"),
        (random_network("swin"), {"RESNETS": {"DEPTH": 101}}, "RESNETS.DEPTH does not fit .*fpn_backbone; remove it"),
        (random_network("swin"), {"RESNETS": {"NORM": "BN"}}, "NORM BN: swin has no batch norm"),
        (random_network("resnet"), {"RESNETS": {"NORM": "GN"}}, "NORM GN is not supported"),
        (random_network("swin"), {"FPN": {"IN_FEATURES": []}}, "FPN.IN_FEATURES must be maps .*: res2, res3, res4"),
        (random_network("pvt_v2"), {"BACKBONE": {"FREEZE_AT": 1}}, "FREEZE_AT 1: the stem of pvt_v2 is part of its f"),
        (random_network("swin"), {"BACKBONE": {"NAME": "build_resnet_fpn_backbone"}}, "set the latter to build_transf"),
        (
            random_network("dinov2"),
            {"BACKBONE": {"NAME": "build_transformers_backbone"}, "RESNETS": {"OUT_FEATURES": ["res5"]}, **BOX_HEAD},
            "RESNETS.OUT_FEATURES must be maps of the network: res4.",
        ),
        (
            {"CONFIG": {"model_type": "hiera"}},
            {},
            "hiera gives no maps of images of any size",
        ),
    ],
)
def test_what_a_network_cannot_follow_is_refused(network: dict, model: dict, message: str):
    tree = fpn_tree(network)
    for section, keys in model.items():
        tree["MODEL"][section] = tree["MODEL"].get(section, {}) | keys
    with pytest.raises(UserError, match=message):
        DetectorConfig.from_yaml(tree)


def test_pixels_are_those_of_the_image_processor_or_are_stated(tmp_path: Path):
    folder = publish(tmp_path / "published", SwinConfig(**WINDOWED))
    tree = fpn_tree({"NAME": str(folder)})
    with pytest.raises(UserError, match=r"PIXEL_MEAN \[120.0, .*\] is not that of .*published, whose image processor"):
        DetectorConfig.from_yaml(tree)
    unknown = publish(tmp_path / "unknown", SwinConfig(**WINDOWED), has_processor=False)
    tree = fpn_tree({"NAME": str(unknown)})
    assert DetectorConfig.from_yaml(tree).input.pixel_mean == (120, 110, 100)
    with pytest.raises(UserError, match=r"INPUT.FORMAT must be stated, because no image processor of .*unknown was"):
        DetectorConfig.from_yaml(without_pixels(tree))


def test_weights_of_another_network_are_refused(tmp_path: Path):
    folder = publish(tmp_path / "published", SwinConfig(**WINDOWED))
    read = DetectorConfig.from_yaml(without_pixels(fpn_tree({"NAME": str(folder)})))
    publish(folder, ResNetConfig(**NETWORKS["resnet"][1]))
    with pytest.raises(UserError, match=r"published does not fit the model's config: .* missing \(swin"):
        FasterRCNN(read).backbone.load_published_weights()


# timm


def test_networks_of_timm():
    pytest.importorskip("timm", reason="timm is an optional package of transformers")
    tree = fpn_tree({"CONFIG": {"model_type": "timm_backbone", "backbone": "resnet18"}})
    config = DetectorConfig.from_yaml(tree)
    below = FasterRCNN(config).backbone.bottom_up.eval()
    assert [shape.channels for shape in measure(config.transformers.config).maps.values()] == [64, 128, 256, 512]
    pixels = torch.randn(1, 3, 64, 96)
    maps = below(pixels)
    for feature_map, other in zip(maps.values(), below.network._backbone(pixels), strict=True):
        torch.testing.assert_close(feature_map, other)
    with pytest.raises(UserError, match="FREEZE_AT 2: the stages of timm_backbone are not known; set it to 0"):
        DetectorConfig.from_yaml(fpn_tree(tree["MODEL"]["TRANSFORMERS_BACKBONE"], freeze_at=2))
    named = without_pixels(fpn_tree({"NAME": "timm/efficientnet_b0"}, freeze_at=5))
    config = DetectorConfig.from_yaml(named)
    assert config.input.pixel_std == pytest.approx((58.395, 57.12, 57.375))
    model = FasterRCNN(config).backbone.bottom_up
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert not any(weight.requires_grad for weight in model.parameters())


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_its_name_is_said():
    tree = fpn_tree({"CONFIG": {"model_type": "timm_backbone", "backbone": "resnet18"}})
    with pytest.raises(UserError, match=r"TimmBackbone requires the timm library .*; install it"):
        DetectorConfig.from_yaml(tree)


# The table of docs/detectors.md


def table_row(model_type: str) -> str:
    outline = measure(fpn_config(model_type).transformers.config)
    strides = ", ".join(str(shape.stride) for shape in outline.maps.values())
    detector = FasterRCNN(fpn_config(model_type))
    try:
        detector.recompute_activations()
        recomputes = "yes"
    except UserError:
        recomputes = "no"
    pyramid = "simple" if outline.is_plain else "FPN"
    stem = "yes" if outline.has_stem else "no"
    example = NETWORKS[model_type][0] or "none known"
    norm = "FrozenBN, BN" if outline.has_batch_norm else "none"
    return f"| {model_type} | {example} | {strides} | {pyramid} | {norm} | {stem} | {recomputes} |"


def test_the_table_of_backbones_is_true():
    lines = (ROOT / "docs" / "detectors.md").read_text("utf-8").splitlines()
    rows = [table_row(model_type) for model_type in NETWORKS]
    assert len(rows) >= 10
    assert [row for row in rows if row not in lines] == [], "\n".join(rows)

"""Tiny detectors of transformers with random weights, saved as folders as the hub has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForObjectDetection,
    AutoModelForZeroShotObjectDetection,
    BertConfig,
    BertTokenizerFast,
    CLIPTokenizerFast,
    DetrConfig,
    DetrImageProcessor,
    DFineConfig,
    GroundingDinoConfig,
    GroundingDinoImageProcessor,
    GroundingDinoProcessor,
    HGNetV2Config,
    MMGroundingDinoConfig,
    Owlv2Config,
    Owlv2ImageProcessor,
    Owlv2Processor,
    PreTrainedConfig,
    ResNetConfig,
    RfDetrConfig,
    RTDetrImageProcessor,
    RTDetrResNetConfig,
    RTDetrV2Config,
    SwinConfig,
)

CLASSES = {0: "circle", 1: "square", 2: "star"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "red", "star", "circle", "the", "left", "##s"]
SIDE = 128  # of an image for the network, pixels
ATTENTION = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SIZES = {**ATTENTION, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
WIDTHS = [8, 8, 16, 16]  # of the stages of a backbone


def detr() -> PreTrainedConfig:
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=WIDTHS, depths=[1, 1, 1, 1], out_features=["stage4"])
    return DetrConfig(backbone_config=backbone, num_queries=12, id2label=CLASSES, **SIZES)


def real_time(kind: type[PreTrainedConfig], backbone: PreTrainedConfig) -> PreTrainedConfig:
    return kind(
        backbone_config=backbone,
        encoder_hidden_dim=32,
        encoder_in_channels=WIDTHS[1:],
        decoder_in_channels=[32, 32, 32],
        num_queries=12,
        id2label=CLASSES,
        **SIZES,
    )


def rt_detr_v2() -> PreTrainedConfig:
    stages = ["stage2", "stage3", "stage4"]
    sizes = {"embedding_size": 8, "hidden_sizes": WIDTHS, "depths": [1, 1, 1, 1]}
    return real_time(RTDetrV2Config, RTDetrResNetConfig(**sizes, out_features=stages))


def d_fine() -> PreTrainedConfig:
    backbone = HGNetV2Config(
        stem_channels=[3, 8, 8],
        hidden_sizes=WIDTHS,
        stage_in_channels=[8, *WIDTHS[:3]],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=WIDTHS,
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    return real_time(DFineConfig, backbone)


def rf_detr() -> PreTrainedConfig:
    backbone = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 16,
        "num_windows": 2,
        "out_indices": [1, 2],
    }
    return RfDetrConfig(
        backbone_config=backbone,
        d_model=32,
        num_queries=12,
        decoder_layers=2,
        decoder_ffn_dim=32,
        decoder_self_attention_heads=2,
        decoder_cross_attention_heads=2,
        group_detr=1,
        id2label=CLASSES,
    )


def grounding(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    backbone = SwinConfig(
        embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2, out_indices=[2, 3, 4], image_size=SIDE
    )
    text = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return kind(backbone_config=backbone, text_config=text, num_queries=12, num_feature_levels=4, **SIZES)


def owl_v2() -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Owlv2Config(
        text_config={**sizes, "vocab_size": 60, "bos_token_id": 58, "eos_token_id": 59},
        vision_config={**sizes, "image_size": SIDE, "patch_size": 16},
        projection_dim=32,
        initializer_factor=0.02,
    )


WITH_CLASSES: dict[str, Callable[[], PreTrainedConfig]] = {
    "detr": detr,
    "rt_detr_v2": rt_detr_v2,
    "d_fine": d_fine,
    "rf_detr": rf_detr,
}
ZERO_SHOT: dict[str, Callable[[], PreTrainedConfig]] = {
    "grounding_dino": lambda: grounding(GroundingDinoConfig),
    "mm_grounding_dino": lambda: grounding(MMGroundingDinoConfig),
    "owl_v2": owl_v2,
}


def save_tiny_detector(name: str, folder: Path) -> Path:
    """Save a detector with random weights, always the same ones, and its preprocessing."""
    torch.manual_seed(0)
    size = {"height": SIDE, "width": SIDE}
    if name in WITH_CLASSES:
        network = AutoModelForObjectDetection.from_config(WITH_CLASSES[name]())
        processor = DetrImageProcessor if name == "detr" else RTDetrImageProcessor
        processor(size=size).save_pretrained(folder)
    else:
        network = AutoModelForZeroShotObjectDetection.from_config(ZERO_SHOT[name]())
        folder.mkdir(parents=True, exist_ok=True)
        if name == "owl_v2":
            letters = [*"abcdefghijklmnopqrstuvwxyz "]
            pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|unk|>", "<|pad|>"]
            pieces += [f"<{number}>" for number in range(58 - len(pieces))]
            vocabulary = {piece: number for number, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
            (folder / "vocab.json").write_text(json.dumps(vocabulary))
            (folder / "merges.txt").write_text("#version: 0.2\n")
            tokenizer = CLIPTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
            Owlv2Processor(Owlv2ImageProcessor(size=size), tokenizer).save_pretrained(folder)
        else:
            (folder / "vocab.txt").write_text("\n".join(WORDS))
            tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
            GroundingDinoProcessor(GroundingDinoImageProcessor(size=size), tokenizer).save_pretrained(folder)
    network.save_pretrained(folder)
    return folder

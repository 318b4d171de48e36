"""A tiny pre-training model and a batch for it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch
from e2e_vl.encoders.base import Encoder
from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig, VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, MaskingBatch, TextBatch
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.objectives.texts import MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask, build_objectives

SEP, CLASSES, VOCABULARY = 3, 5, 40
PAPER = {"region_word": "img", "masked_region_embedding": False, "whole_image_in_sequence": False}
BOXES = [[[5, 5, 40, 40], [30, 30, 80, 60], [2, 50, 30, 62]], [[10, 0, 50, 30], [0, 0, 20, 20]]]
PAIRS = torch.tensor([[0, 1], [1, 0], [1, -1], [-1, -1]])  # `image_index` of `make_pairs`


def make_model(
    norm: str = "FrozenBN",
    encoder: dict[str, Any] | None = None,
    objectives: dict[str, Any] | None = None,
    **options: Any,
) -> VisionLanguageModel:
    """The model with options of the encoder, of objectives (name -> weight or config) and of the task."""
    torch.manual_seed(0)
    detector = make_detector(norm)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "feature_dim": detector.feature_dim,
        "geometry_dim": 16,
        "visual_scale_text_init": 1.0,
        "visual_scale_object_init": 1.0,
        "text_only_embedding": True,
        "masked_region_embedding": True,
        "with_pooler": True,
    }
    encoder = VLBertModel(PretrainedVLBertConfig(**settings | (encoder or {})))
    return put_together(detector, encoder, {"masked_regions": {"classes": CLASSES}} | (objectives or {}), **options)


def make_detector(norm: str = "FrozenBN", attributes: int = 0) -> FasterRCNN:
    """A tiny detector with random weights, four classes and some attributes."""
    return FasterRCNN(
        DetectorConfig.from_flat(
            {
                "MODEL.RESNETS.DEPTH": 18,
                "MODEL.RESNETS.STEM_OUT_CHANNELS": 4,
                "MODEL.RESNETS.WIDTH_PER_GROUP": 4,
                "MODEL.RESNETS.RES2_OUT_CHANNELS": 4,
                "MODEL.RESNETS.NORM": norm,
                "MODEL.BACKBONE.FREEZE_AT": 0,
                "MODEL.ROI_HEADS.NUM_CLASSES": CLASSES - 1,
                "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
                "MODEL.ROI_BOX_HEAD.ATTRIBUTES.NUM_CLASSES": attributes,
            }
        ),
        class_names=("a", "b", "c", "d"),
    )


def put_together(
    detector: FasterRCNN, encoder: Encoder, objectives: dict[str, Any], **options: Any
) -> VisionLanguageModel:
    """The pre-training model of these parts, with options of the task."""
    sizes = Sizes(16, VOCABULARY, detector.feature_dim, detector.num_classes, encoder.summary_size)
    config = PretrainingConfig(objectives=objectives, **options)
    task = PretrainingTask(sizes, config, build_objectives(objectives, sizes))
    for ability in task.needs:
        encoder.require(ability, "The task")
    task.init_weights(None, encoder, detector)
    has_copy = task.region_masking.needs_frozen_teacher
    return VisionLanguageModel(detector, encoder, task, teacher=copy.deepcopy(detector) if has_copy else None)


def make_batch(seed: int = 0, masks: bool = True, boxes: bool = True) -> Batch:
    """Two captions about image 0, one about image 1, and one text of the corpus."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 4, 5, 6])
    attention_mask = torch.arange(7) < lengths[:, None]
    ids = torch.randint(4, VOCABULARY, (4, 7), generator=generator) * attention_mask
    ids[torch.arange(4), lengths - 1] = SEP
    words, corpus = torch.full((4, 7), -1), torch.full((4, 7), -1)
    if masks:
        words[0, 1], words[1, 2], corpus[3, 0] = 9, 8, 7
    return Batch(
        images=ImageBatch(
            torch.randn(2, 3, 64, 96, generator=generator) * 50,
            torch.tensor([[64, 96], [60, 80]]),
            torch.tensor([[64, 96], [60, 80]]),
            ["first.jpg", "second.jpg"],
        ),
        boxes=[torch.tensor(rows, dtype=torch.float32) for rows in BOXES] if boxes else None,
        texts=TextBatch(ids, torch.zeros_like(ids), attention_mask),
        image_index=torch.tensor([[0], [0], [1], [-1]]),
        targets=PretrainingTargets(
            {
                "masked_words": WordLabels(words),
                "masked_text": WordLabels(corpus),
                "masked_regions": Targets(),
                "relationship": MatchTargets(torch.tensor([1, 0, 1, -1])),
            }
        ),
        masking=MaskingBatch(torch.tensor([11, 12, 13, 14])),
        records=[*({"text_index": index} for index in range(3)), {}],
    )


def make_pairs(**changes: Any) -> Batch:
    """The same texts; the first two have both images, in either order."""
    return dataclasses.replace(make_batch(**changes), image_index=PAIRS)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Assert equality up to rounding, which depends on the machine."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `assert_same` passes."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)

"""All objectives together, with an encoder on saved features: nothing that is masked reaches the logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from detector.config import DetectorConfig
from detector.structures import ImageBatch, PrecomputedDetector, PrecomputedFeatures
from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, DetectedLabels, MaskingBatch, RegionLabels, RegionMasks, TextBatch
from e2e_vl.targets import Targets
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.texts import AnswerLabel, MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask, build_objectives

VOCABULARY, WIDTH, FEATURE, CLASSES, ATTRIBUTES = 20, 16, 6, 5, 4
IMAGES, REGIONS, LENGTH = 2, 4, 5
MASKED = (0, 1)  # image and region
OTHER = (1, 2)
SETTINGS = {
    "masked_words": {"weight": 1.0, "whole_words": False},
    "masked_text": 0.0,
    "masked_regions": 0.0,
    "relationship": 1.0,
    "object_labels": {"weight": 1.0, "classes": CLASSES},
    "attribute_labels": {"weight": 1.0, "classes": ATTRIBUTES},
    "region_features": 1.0,
    "image_qa": {"weight": 1.0, "answers": ["yes", "no", "two"]},
}
OBJECTIVES = [name for name, value in SETTINGS.items() if value]


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    torch.manual_seed(0)
    config = PretrainedLxmertConfig(
        vocab_size=VOCABULARY,
        feature_dim=FEATURE,
        hidden_size=WIDTH,
        l_layers=1,
        r_layers=1,
        x_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        masked_region_feature=True,
    )
    detector = PrecomputedDetector(DetectorConfig())
    detector.feature_dim = FEATURE
    sizes = Sizes(WIDTH, VOCABULARY, FEATURE, CLASSES)
    settings = PretrainingConfig(teacher="file", mask_pixels=False, max_length=None)
    task = PretrainingTask(sizes, settings, build_objectives(SETTINGS, sizes))
    return VisionLanguageModel(detector, LxmertEncoder(config), task).eval()


def make_batch(*, masks: bool = True, replaces: bool = False) -> Batch:
    """Two texts about an image each; with `replaces` the region has the feature of another one instead of none."""
    generator = torch.Generator().manual_seed(1)
    corners = torch.rand(IMAGES, REGIONS, 2, generator=generator) * 4
    labelled, masked = ([torch.zeros(REGIONS, dtype=torch.bool) for _ in range(IMAGES)] for _ in range(2))
    labelled[MASKED[0]][MASKED[1]] = True
    masked[MASKED[0]][MASKED[1]] = masks and not replaces
    replacement_index = [torch.full((REGIONS,), -1) for _ in range(IMAGES)] if replaces else None
    if replaces:
        replacement_index[MASKED[0]][MASKED[1]] = OTHER[0] * REGIONS + OTHER[1]
    features = [torch.randn(REGIONS, FEATURE, generator=generator) for _ in range(IMAGES)]
    ids = torch.randint(5, VOCABULARY, (IMAGES, LENGTH), generator=generator)
    size = torch.full((IMAGES, 2), 10)
    parts: dict[str, Targets] = {
        "masked_words": WordLabels(torch.tensor([[-1, 7, -1, -1, -1], [-1, -1, 3, -1, -1]])),
        "relationship": MatchTargets(torch.tensor([1, 1])),
        "image_qa": AnswerLabel(torch.tensor([0, 2])),
        **{name: Targets() for name in ("object_labels", "attribute_labels", "region_features")},
    }
    return Batch(
        images=ImageBatch(torch.zeros(IMAGES, 3, 0, 0), size, size, ["a", "b"], PrecomputedFeatures(features)),
        boxes=list(torch.cat([corners, corners + 5], dim=2)),
        texts=TextBatch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)),
        image_index=torch.arange(IMAGES)[:, None],
        targets=PretrainingTargets(parts),
        masking=MaskingBatch(masked_regions=RegionMasks(labelled, masked, replacement_index)),
        region_labels=RegionLabels(
            features=[rows.clone() for rows in features],
            detected=DetectedLabels(
                classes=[torch.tensor([0, 1, 2, 3])] * IMAGES,
                scores=[torch.full((REGIONS,), 0.9)] * IMAGES,
                attributes=[torch.tensor([3, 2, 1, 0])] * IMAGES,
                attribute_scores=[torch.full((REGIONS,), 0.8)] * IMAGES,
            ),
        ),
    )


def logits_of(model: VisionLanguageModel, batch: Batch) -> dict[str, Tensor]:
    with torch.no_grad():
        return model(batch).task.parts


def with_other_feature(batch: Batch, place: tuple[int, int]) -> Batch:
    image, row = place
    features = [rows.clone() for rows in batch.images.precomputed.features]
    features[image][row] += 3.0
    return dataclasses.replace(
        batch, images=dataclasses.replace(batch.images, precomputed=PrecomputedFeatures(features))
    )


def with_other_labels(batch: Batch) -> Batch:
    labels, parts = batch.region_labels, batch.targets.parts
    words = parts["masked_words"].labels
    return dataclasses.replace(
        batch,
        region_labels=dataclasses.replace(
            labels,
            features=[rows * -2 + 1 for rows in labels.features],
            detected=DetectedLabels(
                classes=[(rows + 1) % CLASSES for rows in labels.detected.classes],
                scores=[rows / 3 for rows in labels.detected.scores],
                attributes=[(rows + 1) % ATTRIBUTES for rows in labels.detected.attributes],
                attribute_scores=[rows / 3 for rows in labels.detected.attribute_scores],
            ),
        ),
        targets=PretrainingTargets(
            {
                **parts,
                "masked_words": WordLabels(torch.where(words >= 0, words + 1, words)),
                "relationship": MatchTargets(1 - parts["relationship"].is_match),
                "image_qa": AnswerLabel(2 - parts["image_qa"].answer),
            }
        ),
    )


def differ(one: dict[str, Tensor], two: dict[str, Tensor]) -> set[str]:
    return {name for name in OBJECTIVES if not torch.allclose(one[name], two[name], atol=1e-6)}


def test_the_feature_of_a_masked_region_reaches_no_logits(model):
    batch = make_batch()
    assert not differ(logits_of(model, batch), logits_of(model, with_other_feature(batch, MASKED)))
    shown = make_batch(masks=False)
    assert differ(logits_of(model, shown), logits_of(model, with_other_feature(shown, MASKED))) == set(OBJECTIVES)


def test_a_replaced_region_has_the_other_feature_and_not_its_own(model):
    batch = make_batch(replaces=True)
    before = logits_of(model, batch)
    assert not differ(before, logits_of(model, with_other_feature(batch, MASKED)))
    after = logits_of(model, with_other_feature(batch, OTHER))
    assert not torch.allclose(before["relationship"][MASKED[0]], after["relationship"][MASKED[0]])


def test_no_label_reaches_the_logits(model):
    batch = make_batch()
    before, after = model(batch).task, model(with_other_labels(batch)).task
    for name in OBJECTIVES:
        torch.testing.assert_close(before.parts[name], after.parts[name])
        assert not torch.isclose(before.losses[name].mean, after.losses[name].mean), f"{name} learns from its label"

"""Segmentation: which region learns which mask, and the masks of answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch
from e2e_vl.drawing import RED
from e2e_vl.masks import RunLengths, encode_masks
from e2e_vl.samples import ReferredBoxes, SampleText
from e2e_vl.structures import (
    Batch,
    EncoderOutput,
    ModelOutput,
    SegmentationOutput,
    TaskOutput,
    TextBatch,
    gather_regions,
)
from e2e_vl.targets import NamedMasks
from e2e_vl.tasks.config import ReferringConfig
from e2e_vl.tasks.refcoco import ReferringTargets, ReferringTask
from e2e_vl.tasks.segmentation import SEGMENTATION, Segmentation
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import photo, preprocess, sample_of

CONFIGS = Path(__file__).parents[2] / "configs" / "detector"
SIZES = torch.tensor([[64, 96], [64, 64]])
BOXES = [
    torch.tensor([[4.0, 4.0, 44.0, 44.0], [50.0, 10.0, 90.0, 60.0]]),
    torch.tensor([[10.0, 10.0, 60.0, 60.0]]),
]


def make_detector(**mask_head: object) -> FasterRCNN:
    torch.manual_seed(0)
    tree = {"_BASE_": str(CONFIGS / "tiny_fpn.yaml")}
    settings = {"CONV_DIM": 8, "CLS_AGNOSTIC_MASK": True} | mask_head
    return FasterRCNN(DetectorConfig.from_yaml(tree | {"MODEL": {"MASK_ON": True, "ROI_MASK_HEAD": settings}}))


def text_targets(boxes: list[list[float]], shape: tuple[int, int] = (64, 96)) -> ReferringTargets:
    """Targets of a text about objects that fill the left half of their boxes."""
    masks = np.zeros((len(boxes), *shape), dtype=bool)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[int(y1) : int(y2), int(x1) : int(x1 + x2) // 2] = True
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    return ReferringTargets(corners, (masks, corners))


def make_output(detector: FasterRCNN, targets: ReferringTargets | None, image_index=((0,), (0,), (1,))) -> ModelOutput:
    """The output for texts about two images, before there are masks."""
    pixels = torch.randint(0, 256, (2, 3, 64, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = ImageBatch(pixels, SIZES, 2 * SIZES, ["a.jpg", "b.jpg"])
    shape = (len(image_index), 3)
    texts = TextBatch(*(torch.ones(shape, dtype=kind) for kind in (torch.long, torch.long, torch.bool)))
    records = [
        {"text_index": row, "image_size": (2 * SIZES[image[0]]).tolist()} for row, image in enumerate(image_index)
    ]
    batch = Batch(images, BOXES, texts, torch.tensor(image_index), targets, records=records)
    regions = detector(images, BOXES)
    text_regions = gather_regions(regions, images.sizes, batch.image_index)
    encoded = EncoderOutput(torch.zeros(*shape, 4), torch.zeros(*text_regions.row.shape, 4))
    return ModelOutput(TaskOutput({}, torch.zeros(1)), regions, text_regions, encoded, batch)


def test_masks_of_texts_are_padded_and_know_their_text():
    joined = NamedMasks.join(
        [
            (np.ones((2, 3, 4), dtype=bool), np.zeros((2, 4), np.float32)),
            None,
            (np.ones((1, 5, 2), dtype=bool), np.ones((1, 4), np.float32)),
        ]
    )
    assert joined.masks.shape == (3, 5, 4) and joined.masks.sum() == 12 + 12 + 10
    assert joined.owner.tolist() == [0, 0, 2]
    assert joined.boxes.tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]
    assert NamedMasks.join([None]).masks.shape == (0, 1, 1)


def test_the_best_region_learns_a_mask_and_its_gradient_reaches_the_backbone():
    detector = make_detector()
    near = [6.0, 6.0, 44.0, 44.0]  # fits the first region of the first image
    far = [0.0, 50.0, 20.0, 64.0]  # fits none
    targets = ReferringTargets.join(
        [text_targets([near]), text_targets([far]), text_targets([[10.0, 10.0, 60.0, 60.0]], (64, 64))]
    )
    output = make_output(detector, targets)
    segmentation = Segmentation(min_iou=0.5)(detector, output, None)
    loss = segmentation.losses[SEGMENTATION]
    assert segmentation.probabilities is None
    assert loss.count.item() == 2
    assert loss.mean.item() == pytest.approx(np.log(2), abs=0.05)  # the predictor begins at probabilities of one half
    loss.mean.backward()
    assert next(detector.backbone.parameters()).grad.abs().max() > 0
    strict = Segmentation(min_iou=0.95)(detector, output, None).losses[SEGMENTATION]
    assert strict.count.item() == 1


def test_no_named_mask_gives_loss_zero_and_no_targets_no_loss():
    detector = make_detector()
    nothing = ReferringTargets.join([text_targets([])] * 3)
    loss = Segmentation()(detector, make_output(detector, nothing), None).losses[SEGMENTATION]
    loss.mean.backward()
    assert loss.mean.item() == 0 and detector.roi_heads.mask_head.predictor.weight.grad.abs().max() == 0
    assert Segmentation()(detector, make_output(detector, None), None).losses == {}


def test_masks_are_learned():
    """The left half of each box, in 40 steps."""
    detector = make_detector(NUM_CONV=1)
    targets = ReferringTargets.join(
        [text_targets([BOXES[0][row].tolist()]) for row in range(2)] + [text_targets([BOXES[1][0].tolist()], (64, 64))]
    )
    optimizer = torch.optim.Adam(detector.parameters(), lr=0.01)
    for _ in range(40):
        output = make_output(detector, targets)
        loss = Segmentation()(detector, output, None).losses[SEGMENTATION].mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.4
    masks = Segmentation()(detector, output, torch.tensor([0, 1, 0])).probabilities
    expected = torch.zeros(28, 28, dtype=torch.bool)
    expected[:, :14] = True
    assert ((masks > 0.5) == expected).float().mean() > 0.9


def test_a_head_with_a_mask_per_class_takes_the_best_class_of_the_region():
    detector = make_detector(CLS_AGNOSTIC_MASK=False).eval()
    output = make_output(detector, None)
    probabilities = Segmentation()(detector, output, torch.tensor([1, 0, 0])).probabilities
    rois = torch.cat([torch.tensor([[0.0], [0.0], [1.0]]), torch.stack([BOXES[0][1], BOXES[0][0], BOXES[1][0]])], dim=1)
    classes = [logits[:, :-1].argmax(dim=1) for logits in output.regions.class_logits]
    expected = detector.mask_logits(
        output.regions.maps, rois, torch.stack([classes[0][1], classes[0][0], classes[1][0]])
    )
    torch.testing.assert_close(probabilities, expected.sigmoid())


def predict(logits: list[list[float]]) -> list:
    """Predictions with masks whose left half is set, for the images of `BOXES`."""
    task = ReferringTask(4, ReferringConfig(null_candidate=True, allow_no_regions=True))
    output = make_output(make_detector().eval(), None)
    output.task = TaskOutput({}, torch.tensor(logits))
    assert task.chosen_regions(output.task, output.text_regions).tolist() == [1, -1, 0]
    probabilities = torch.zeros(3, 28, 28)
    probabilities[:, :, :14] = 1
    output.segmentation = SegmentationOutput(probabilities, {})
    return task.predict(output)


def test_the_answer_has_a_mask_in_pixels_of_the_original_image_and_none_fits_an_empty_one():
    lowest = -torch.inf
    predictions = predict([[0.0, 5.0, 1.0], [0.0, 1.0, 5.0], [3.0, lowest, 0.0]])  # the last column: nothing fits
    masks = [prediction.segmentation.to_mask() for prediction in predictions]
    expected = np.zeros((128, 192), dtype=bool)
    expected[20:120, 100:140] = True  # of the box [100, 20, 180, 120]
    assert (masks[0] & expected).sum() / (masks[0] | expected).sum() > 0.97
    assert predictions[1].box is None and not masks[1].any()
    assert masks[2].shape == (128, 128) and masks[2][22:118, 22:68].all()


def test_expressions_bring_masks_of_the_resized_image_and_their_truth(tokenizer):
    left = [[0.0, 0, 30, 0, 30, 60, 0, 60]]
    crowd = RunLengths((60, 100), [4200, 1800])  # columns 70 to 99
    truth = ReferredBoxes(((0.0, 0, 30, 60), (70.0, 0, 100, 60)), (1, 2), masks=(left, crowd))
    task = ReferringTask(4)
    preprocessor = task.preprocessor(TextTokenizer(tokenizer))
    [encoded] = preprocess(
        preprocessor, sample_of(SampleText(0, "red box", {}, truth=truth)), photo(scale=2, flipped=True)
    )
    masks, boxes = encoded.targets.masks
    assert masks.shape == (2, 120, 200) and masks[0, :, 140:].all() and masks[0].sum() == 120 * 60
    assert masks[1, :, :60].all() and np.array_equal(boxes, encoded.targets.boxes)
    true_mask = RunLengths(
        tuple(encoded.record["gt_segmentation"]["size"]), encoded.record["gt_segmentation"]["counts"]
    )
    assert true_mask == encode_masks([left, crowd], (60, 100)) and true_mask.to_mask().sum() == 60 * 60


def test_the_mask_is_drawn(tmp_path):
    from PIL import Image

    Image.new("RGB", (192, 128), (200, 200, 200)).save(tmp_path / "a.png")
    [prediction, *_] = predict([[0.0, 5.0, 1.0], [0.0, 1.0, 5.0], [3.0, -torch.inf, 0.0]])
    prediction.file_name = str(tmp_path / "a.png")
    picture = ReferringTask(4).draw(prediction)
    scale = picture.shape[1] / 192
    tinted = np.round((np.array(RED) + 200) / 2)
    assert np.abs(picture[int(100 * scale), int(120 * scale)] - tinted).max() <= 1
    assert (picture[int(100 * scale), int(160 * scale)] == 200).all()

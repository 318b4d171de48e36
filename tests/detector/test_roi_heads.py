"""RoI heads: box head, box predictor, and RoIs in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detector import roi_heads
from detector.config import AttributeConfig, BoxHeadConfig, DetectorConfig, ROIHeadsConfig
from detector.faster_rcnn import FasterRCNN
from detector.roi_heads import BoxHead, BoxPredictor
from detector.structures import DetectionTargets
from tests.detector import published

STYLES = {
    "pooled_after": {},  # bottlenecks, whose 1x1 convolutions come before the pooling
    "dilated": {"MODEL.RESNETS.RES5_DILATION": 2},
    "pool": {"MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIPool"},
    "basic": {"MODEL.RESNETS.DEPTH": 18},
}


def make_detector(style: str, **more: object) -> FasterRCNN:
    flat = DetectorConfig.from_yaml(published.WITHOUT_ATTRIBUTES).to_flat()
    flat |= {"MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2", "MODEL.RESNETS.RES5_DILATION": 1}
    torch.manual_seed(0)
    return FasterRCNN(DetectorConfig.from_flat(flat | STYLES[style] | more)).eval()


@pytest.mark.parametrize("resolution", [7, 8])
@pytest.mark.parametrize("style", STYLES)
def test_the_side_of_the_last_map_is_known_before_it_is_there(style, resolution):
    detector = make_detector(style, **{"MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": resolution})
    with torch.no_grad():
        maps = detector.roi_heads.res5_map(torch.zeros(1, 32, 4, 4), torch.tensor([[0.0, 0, 0, 30, 30]]))
    assert detector.map_size == maps.shape[2] == maps.shape[3]


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_chunks_give_the_same_features(style: str, with_masks: bool, monkeypatch: pytest.MonkeyPatch):
    heads = make_detector(style).roi_heads
    generator = torch.Generator().manual_seed(1)
    features = {"res4": torch.randn(3, 32, 9, 12, generator=generator)}
    corners = 100 * torch.rand(23, 2, 2, generator=generator).sort(dim=1).values
    image = torch.randint(0, 3, (23, 1), generator=generator)  # in no order
    rois = torch.cat((image.float(), corners[:, 0], corners[:, 1] + 5), dim=1)
    before = rois.clone()
    seen = []
    single = heads._describe
    monkeypatch.setattr(
        heads, "_describe", lambda maps, rows, masks: seen.append(len(rows)) or single(maps, rows, masks)
    )
    with torch.no_grad():
        side = heads.res5_map(features["res4"], rois).shape[-1]
        masks = torch.rand(23, side, side, generator=generator) if with_masks else None
        expected = heads.describe(features, rois, masks).region
        monkeypatch.setattr(roi_heads, "CHUNK", 5)
        found = heads.describe(features, rois, masks).region
        assert seen == [23, 5, 5, 5, 5, 3]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
        assert torch.equal(rois, before)
        heads.train()  # batch norms see all RoIs
        heads.describe(features, rois, masks)
    heads.eval()
    heads.describe(features, rois, masks)  # what the backward pass needs is kept anyway
    assert seen[-2:] == [23, 23]


def test_without_fully_connected_layers_the_map_is_flattened():
    head = BoxHead(BoxHeadConfig(name="FastRCNNConvFCHead", conv_dim=6, num_conv=1), in_channels=4, side=3)
    maps = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(head(maps).predictor, F.relu(head.conv1(maps)).flatten(1))
    assert head.predictor_dim == 6 * 3**2


def test_attribute_loss_averages_over_the_labels_of_each_foreground_roi():
    torch.manual_seed(0)
    attributes = AttributeConfig(num_classes=4, embedding_dim=5, hidden_dim=7, loss_weight=0.5)
    predictor = BoxPredictor(6, ROIHeadsConfig(num_classes=3), attributes)
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter)
    features = torch.randn(5, 6)
    classes = torch.tensor([0, 2, 3, 1, 1])
    labels = torch.tensor([[1, 3, -1], [0, -1, -1], [2, 2, 2], [-1, -1, -1], [-1, 2, -1]])
    loss = predictor.attribute_loss(features, classes, labels)
    logits = predictor.attributes(features, classes)  # with the embedding of the annotated class

    def entropy(row: int, label: int) -> torch.Tensor:
        return F.cross_entropy(logits[row], torch.tensor(label))

    expected = (entropy(0, 1) + entropy(0, 3)) / 2 + entropy(1, 0) + entropy(4, 2)
    torch.testing.assert_close(loss.total, 0.5 * expected)
    assert loss.count == 3  # background and unlabelled objects take no part


BOXES = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 6], [0, 0, 10, 4], [50, 50, 60, 60]])
TARGETS = DetectionTargets([BOXES[:1]], [torch.tensor([1])])  # IoU 1, 0.6, 0.4, 0 with the boxes
NOT_APPENDED = {"MODEL.ROI_HEADS.PROPOSAL_APPEND_GT": False}


@pytest.mark.parametrize(
    ("settings", "foreground", "background"),
    [
        ({}, [0, 1], [2, 3]),
        ({"MODEL.ROI_HEADS.IOU_THRESHOLDS": [0.7]}, [0], [1, 2, 3]),
        ({"MODEL.ROI_HEADS.IOU_THRESHOLDS": [0.3]}, [0, 1, 2], [3]),
        ({"MODEL.ROI_HEADS.IOU_THRESHOLDS": [0.5, 0.7], "MODEL.ROI_HEADS.IOU_LABELS": [0, -1, 1]}, [0], [2, 3]),
    ],
)
def test_proposals_are_labelled_by_the_thresholds_of_the_settings(settings, foreground, background):
    heads = make_detector("basic", **NOT_APPENDED, **settings).roi_heads
    sampled = heads.label_and_sample([BOXES], TARGETS)
    rows = [BOXES.tolist().index(box) for box in sampled.boxes[0].tolist()]
    is_foreground = (sampled.classes[0] == 1).tolist()
    assert sorted(row for row, is_object in zip(rows, is_foreground, strict=True) if is_object) == foreground
    assert sorted(row for row, is_object in zip(rows, is_foreground, strict=True) if not is_object) == background


@pytest.mark.parametrize("training", [True, False])
def test_annotated_boxes_join_the_proposals(training):
    heads = make_detector("basic").roi_heads.train(training)
    sampled = heads.label_and_sample([BOXES[3:]], TARGETS)
    assert sampled.boxes[0].tolist() == [BOXES[0].tolist(), BOXES[3].tolist()]
    assert sampled.classes[0].tolist() == [1, heads.num_classes] and sampled.foreground == [1]


def test_the_box_loss_reads_the_deltas_of_the_annotated_class():
    heads = make_detector("basic", **NOT_APPENDED).roi_heads
    sampled = heads.label_and_sample([BOXES[1:2]], TARGETS)
    features = torch.ones(1, heads.box_predictor.cls_score.in_features)
    heads.losses(features, sampled, TARGETS)["loss_box_reg"].total.backward()
    gradients = heads.box_predictor.bbox_pred.bias.grad.unflatten(0, (-1, 4))
    assert gradients.any(dim=1).nonzero().flatten().tolist() == [1]


def test_detections_are_clipped_to_their_image():
    heads = make_detector("basic").roi_heads
    sizes = [(20, 100), (90, 30)]  # height, width
    proposals = [torch.tensor([[-5.0, -5, 120, 120]])] * 2
    logits = torch.zeros(2, heads.num_classes + 1)
    logits[:, 0] = 9
    detections = heads.detect(logits, torch.zeros(2, 4 * heads.num_classes), proposals, sizes)
    best = [rows[0].tolist() for rows in detections.boxes]
    assert best == [[0, 0, 100, 20], [0, 0, 30, 90]]
    assert [int(rows[0]) for rows in detections.classes] == [0, 0]
    assert [int(rows[0]) for rows in detections.proposal_index] == [0, 0]


def test_the_box_loss_has_a_weight_of_its_own():
    losses = []
    for weight in (1.0, 3.0):
        heads = make_detector("basic", **NOT_APPENDED, **{"MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_WEIGHT": weight}).roi_heads
        sampled = heads.label_and_sample([BOXES[1:]], TARGETS)  # without the box that needs no change
        features = torch.ones(len(sampled.classes[0]), heads.box_predictor.cls_score.in_features)
        losses.append(heads.losses(features, sampled, TARGETS))
    once, thrice = losses
    assert once["loss_box_reg"].total > 0
    torch.testing.assert_close(thrice["loss_box_reg"].total, 3 * once["loss_box_reg"].total)
    assert thrice["loss_cls"].total == once["loss_cls"].total

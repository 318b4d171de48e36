"""Torchvision's own Faster R-CNN behind the calls that the detector benchmark times."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FasterRCNN as TorchvisionModel

from detector.checkpoint import load_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN, pad_to_multiple
from detector.structures import DetectionTargets, ImageBatch, Loss, Regions
from detector.weight_names import from_torchvision_detector

RIVALS = ("torchvision_R_50_FPN", "torchvision_R_50_FPN_v2")  # settings in detector/published
DIVISIBILITY = 32  # of the sides of torchvision's batches


class TorchvisionDetector(nn.Module):
    """Features of given boxes, and the losses of the detector, from one backbone pass of torchvision's model."""

    def __init__(self, model: TorchvisionModel) -> None:
        super().__init__()
        self.model = model
        self.num_classes = model.roi_heads.box_predictor.cls_score.out_features - 1

    def forward(self, images: ImageBatch, boxes: list[Tensor], targets: DetectionTargets | None = None) -> Regions:
        """The images are resized and normalised, as for the built-in detector; torchvision's transform is not used."""
        model = self.model
        sizes = [(height, width) for height, width in images.sizes.tolist()]
        pixels = pad_to_multiple(images.pixels, DIVISIBILITY)
        maps = model.backbone(pixels)
        losses = {}
        if targets is not None:
            rows = zip(targets.boxes, targets.classes, strict=True)
            objects = [{"boxes": rows, "labels": classes + 1} for rows, classes in rows]
            padded = detection.image_list.ImageList(pixels, sizes)
            proposals, losses = model.rpn(padded, maps, objects)
            losses |= model.roi_heads(maps, proposals, sizes, objects)[1]
        heads = model.roi_heads
        features = heads.box_head(heads.box_roi_pool(maps, boxes, sizes))
        counts = [len(rows) for rows in boxes]
        logits = heads.box_predictor.cls_score(features)
        one = features.new_ones(())
        means = {name: Loss(value, one) for name, value in losses.items()}
        return Regions(boxes, list(features.split(counts)), list(logits.split(counts)), losses=means)


def make_pair(tree: dict[str, Any], name: str) -> dict[str, nn.Module]:
    """The built-in detector and torchvision's, with the same weights and the same number of RoIs in training.

    Version 1 trains from res3 on, as torchvision does it for weights of COCO. In version 2 everything is trained.

    Args:
        tree: Detectron2 settings on top of one of `RIVALS`.
        name: which one.
    """
    is_v2 = name == RIVALS[1]
    if is_v2:
        tree = tree | {"MODEL": tree["MODEL"] | {"BACKBONE": {"FREEZE_AT": 0}}}
    config = DetectorConfig.from_yaml(tree)
    options = {"num_classes": config.roi_heads.num_classes + 1}
    options["box_batch_size_per_image"] = config.roi_heads.batch_size_per_image
    if is_v2:
        model = detection.fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, **options)
    else:
        model = TorchvisionModel(
            resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=3), **options
        )
    builtin = FasterRCNN(config)
    load_weights(builtin, from_torchvision_detector(model.state_dict(), name), name)
    return {"builtin": builtin, "torchvision": TorchvisionDetector(model)}

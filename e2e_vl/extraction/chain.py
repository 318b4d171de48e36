"""A detector, a rule that chooses boxes, and the features of the chosen ones: what bulk extraction does to a batch.

Shape legend
    N   images of the batch, all of one size, so that no image is padded
    P   proposals of one image
    R   chosen boxes of one image
    D   width of a region feature
    K   foreground classes; class logits have K + 1 columns, background last
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.ops import batched_nms, nms

from detector.boxes import clip, decode_deltas, is_larger
from detector.faster_rcnn import TwoStageDetector
from detector.images import resize_boxes
from detector.roi_heads import to_rois
from detector.selection import SelectionRule, best_class_boxes, select_max_conf, select_max_nms, select_regions
from detector.structures import ImageBatch
from e2e_vl.data.features.record import RegionFeatures
from e2e_vl.data.image_lists import GivenBoxes
from e2e_vl.data.images import Placement
from e2e_vl.engine.extract import SAME_PLACE

Rule = Literal["score", "maxconf", "maxnms", "given"]
MAX_CANDIDATES = 5000  # best (proposal, class) pairs that the rule "score" looks at; NMS never needs the rest
DEFAULTS = {  # of VL-BERT section 4.1, of bottom-up attention, of the features that LXMERT was trained on
    "score": SelectionRule(0.5, 10, 100),
    "maxconf": SelectionRule(0.2, 10, 100),
    "maxnms": SelectionRule(0.0, 36, 36),
}


@dataclasses.dataclass(frozen=True)
class DescribeSettings:
    """Which boxes are described and what is kept of them.

    rule
      score     detections (NMS within each class; those in one place are one region) by their score
      maxconf   proposals by their best class probability after NMS within each class (bottom-up attention)
      maxnms    each proposal's best class and its refined box, NMS over all, loosened until there are enough (LXMERT)
      given     boxes from a file
    features_of
      proposal  features of the proposals; the boxes of "score" and "maxnms" are refined nonetheless, as in the original
      final     the box head's refined box of the best class is the region and gets its own features
    """

    rule: Rule = "score"
    selection: SelectionRule | None = None  # None: the rule's `DEFAULTS`
    features_of: Literal["proposal", "final"] = "final"
    attributes: bool = False  # most probable attribute of each region
    image_feature: bool = False  # the feature of the whole image

    @property
    def numbers(self) -> SelectionRule:
        return self.selection or DEFAULTS[self.rule]


@dataclasses.dataclass
class _Chosen:
    """Boxes of one image in pixels of the resized image."""

    boxes: Tensor  # float32 [R, 4]
    features: Tensor | None = None  # float [R, D]; None: pooled from the boxes
    scores: Tensor | None = None  # float [R]; None: those that the features give
    classes: Tensor | None = None  # int64 [R]


class Describer:
    """Turns images into `RegionFeatures`.

    Args:
        detector: in evaluation mode, on its device.
        settings: see `DescribeSettings`.

    Raises:
        ValueError: attributes are wanted, but the detector has no attribute head.
    """

    def __init__(self, detector: TwoStageDetector, settings: DescribeSettings) -> None:
        if settings.attributes and not detector.roi_heads.box_predictor.has_attributes:
            raise ValueError("The detector has no attribute head; extract without attributes, or use another config.")
        self.detector = detector
        self.settings = settings

    @torch.no_grad()
    def __call__(self, images: ImageBatch, ids: list[str], given: list[GivenBoxes] | None) -> list[RegionFeatures]:
        """Describe N images.

        Args:
            images: on the detector's device.
            ids: N image ids.
            given: N boxes, with the rule "given" only.

        Raises:
            ValueError: a given box lies outside its image.
        """
        maps = self.detector.features(images)
        if self.settings.rule == "given":
            chosen = [self._given(images, row, boxes) for row, boxes in enumerate(given)]
        else:
            chosen = self._choose(maps, images)
        for one, features in zip(chosen, self._pool(maps, [one.boxes for one in chosen]), strict=True):
            one.features = features if one.features is None else one.features
        whole = None
        if self.settings.image_feature:
            corners = images.sizes.flip(1).float() - 1
            whole = self._pool(maps, list(torch.cat((torch.zeros_like(corners), corners), dim=1)[:, None]))
        records = []
        for row, (one, image_id) in enumerate(zip(chosen, ids, strict=True)):
            image_feature = None if whole is None else whole[row][0]
            records.append(self._record(images, row, image_id, one, image_feature, given[row] if given else None))
        return records

    def _pool(self, maps: Any, boxes: list[Tensor]) -> list[Tensor]:
        pooled = self.detector.describe(maps, to_rois(boxes))
        return list(pooled.split([len(rows) for rows in boxes]))

    def _given(self, images: ImageBatch, row: int, given: GivenBoxes) -> _Chosen:
        """Boxes moved and clamped as training on the same boxes does it."""
        placement = Placement(tuple(images.original_sizes[row].tolist()), tuple(images.sizes[row].tolist()))
        boxes = placement.move_and_clamp_boxes(given.boxes, images.names[row])
        return _Chosen(torch.from_numpy(boxes).to(images.pixels.device))

    def _choose(self, maps: Any, images: ImageBatch) -> list[_Chosen]:
        detector = self.detector
        sizes = [(height, width) for height, width in images.sizes.tolist()]
        originals = images.original_sizes.tolist()
        proposals = detector.propose(detector.run_rpn(maps), sizes)
        pooled = detector.describe(maps, to_rois(proposals))
        logits, deltas = detector.roi_heads.box_predictor(pooled)
        refined = decode_deltas(deltas, torch.cat(proposals), detector.config.roi_heads.box_weights)
        probs = logits.float().softmax(dim=1)[:, :-1]
        chosen = []
        counts = [len(rows) for rows in proposals]
        split = (tensor.split(counts) for tensor in (pooled, probs, refined))
        for boxes, *rest, size, original in zip(proposals, *split, sizes, originals, strict=True):
            chosen.append(self._choose_in_image(boxes, *rest, size, tuple(original)))
        return chosen

    def _choose_in_image(
        self,
        proposals: Tensor,
        pooled: Tensor,
        probs: Tensor,
        refined: Tensor,
        size: tuple[int, int],
        original_size: tuple[int, int],
    ) -> _Chosen:
        """Proposals [P, 4], their features [P, D], probabilities [P, K], refined boxes [P, 4 * K] or [P, 4]."""
        if len(proposals) == 0:
            return _Chosen(proposals, pooled, probs.new_zeros(0), torch.zeros_like(probs, dtype=torch.int64)[:, 0])
        per_class = refined.unflatten(1, (-1, 4)).expand(-1, probs.shape[1], -1)
        is_final = self.settings.features_of == "final"
        if self.settings.rule == "score":
            rows, classes, boxes = self._detections(probs, per_class, size)
            scores = probs[rows, classes]
        else:
            best_boxes, best_scores, best_classes = best_class_boxes(probs, per_class, size)
            usable = torch.arange(len(proposals), device=proposals.device)
            if is_final or self.settings.rule == "maxnms":
                usable = (torch.isfinite(best_boxes).all(dim=1) & is_larger(best_boxes)).nonzero()[:, 0]
            if self.settings.rule == "maxnms":
                kept, _ = select_max_nms(best_boxes[usable], best_scores[usable], self.settings.numbers)
            else:
                in_original = resize_boxes(proposals[usable], size, original_size)
                kept = select_max_conf(in_original, probs[usable], self.settings.numbers)
            rows = usable[kept]
            scores, classes = best_scores[rows], best_classes[rows]
            boxes = best_boxes[rows] if is_final or self.settings.rule == "maxnms" else proposals[rows]
        return _Chosen(boxes, None if is_final else pooled[rows], scores, classes)

    def _detections(self, probs: Tensor, per_class: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of proposals, classes and boxes [R, 4] of the detections that the rule "score" keeps."""
        best = probs.flatten().topk(min(probs.numel(), MAX_CANDIDATES)).indices
        rows, classes = best // probs.shape[1], best % probs.shape[1]
        boxes = clip(per_class[rows, classes], size)
        usable = torch.isfinite(boxes).all(dim=1) & is_larger(boxes)
        rows, classes, boxes = rows[usable], classes[usable], boxes[usable]
        scores = probs[rows, classes]
        kept = batched_nms(boxes, scores, classes, self.detector.config.roi_heads.nms_thresh)
        kept = kept[nms(boxes[kept], scores[kept], SAME_PLACE)]
        kept = kept[select_regions(scores[kept], self.settings.numbers)]
        return rows[kept], classes[kept], boxes[kept]

    def _record(
        self,
        images: ImageBatch,
        row: int,
        image_id: str,
        chosen: _Chosen,
        image_feature: Tensor | None,
        given: GivenBoxes | None,
    ) -> RegionFeatures:
        predictor = self.detector.roi_heads.box_predictor
        original = tuple(images.original_sizes[row].tolist())
        logits = predictor.class_logits(chosen.features)
        scores, classes = chosen.scores, chosen.classes
        if scores is None:
            scores, classes = logits.softmax(dim=1)[:, :-1].max(dim=1)
        attributes = attribute_scores = None
        if self.settings.attributes:  # "no attribute" is dropped before the softmax
            by_region = predictor.attributes(chosen.features, logits.argmax(dim=1))[:, :-1]
            attribute_scores, attributes = by_region.softmax(dim=1).max(dim=1)
        if given is None:
            boxes = resize_boxes(chosen.boxes, tuple(images.sizes[row].tolist()), original)
        else:
            boxes = torch.from_numpy(given.boxes)  # as they were given: scaling there and back would round them
        arrays = {
            "boxes": clip(boxes, original),
            "features": chosen.features,
            "scores": scores,
            "attribute_scores": attribute_scores,
            "image_feature": image_feature,
        }
        labels = {"classes": classes, "attributes": attributes}
        return RegionFeatures(
            image_id=image_id,
            image_size=original,
            box_ids=None if given is None else given.ids,
            **{name: None if one is None else one.float().cpu().numpy() for name, one in arrays.items()},
            **{name: None if one is None else one.cpu().numpy() for name, one in labels.items()},
        )

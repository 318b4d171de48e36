"""Masks of the regions that a task chooses, by the detector's mask head (Mask R-CNN, He et al., section 3).

The head reads the feature maps of the same backbone pass, so masks train the backbone too. A region is cut out where
the boxes of predictions are: with box refinement, at its refined box.

Shape legend: see `e2e_vl/structures.py`; `M` is the number of texts, and here
    B     masks that the texts of the batch name
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from detector.boxes import pairwise_iou
from detector.mask_head import crop_masks, mask_losses
from detector.structures import Detector, Loss
from e2e_vl.structures import ModelOutput, SegmentationOutput
from e2e_vl.targets import NamedMasks

SEGMENTATION = "segmentation"  # the name of the loss


class Segmentation:
    """Predicts the mask of the region that a task chooses for each text.

    Args:
        min_iou: a named mask is learned by the region that fits its box best, from this IoU on.
    """

    def __init__(self, min_iou: float = 0.5) -> None:
        self.min_iou = min_iou

    def __call__(
        self,
        detector: Detector,
        output: ModelOutput,
        chosen_regions: Int64[Tensor, " M"] | None,
        *,
        whole_image: bool = False,
    ) -> SegmentationOutput:
        """Return the masks of M texts, and the loss `segmentation` if the batch has masks that texts name.

        Args:
            chosen_regions: row of the region of each text, -1 = none; its mask is meaningless then. None: no masks.
            whole_image: row 0 of every image's regions is the whole image.
        """
        region_classes = self._region_classes(output, whole_image=whole_image)
        probabilities = None
        if chosen_regions is not None:
            texts = torch.arange(len(chosen_regions), device=chosen_regions.device)
            rows = chosen_regions.clamp(min=0)
            logits = detector.mask_logits(
                output.regions.maps, rois_of(output, texts, rows), region_classes[texts, rows]
            )
            probabilities = logits.detach().sigmoid()
        losses = {}
        named_masks = None if output.batch.targets is None else output.batch.targets.named_masks()
        if named_masks is not None:
            losses[SEGMENTATION] = self._loss(detector, output, named_masks, region_classes)
        return SegmentationOutput(probabilities, losses)

    def _region_classes(self, output: ModelOutput, *, whole_image: bool) -> Int64[Tensor, "M R"]:
        """Return the most probable class of each region, for a head with a mask per class."""
        first = int(whole_image)
        classes = [logits[first:, :-1].argmax(dim=1) for logits in output.regions.class_logits]
        return output.text_regions.gather(classes, fill=0)

    def _loss(
        self, detector: Detector, output: ModelOutput, named: NamedMasks, region_classes: Int64[Tensor, "M R"]
    ) -> Loss:
        """Return the loss of the pairs of a named mask and the region that fits its box best, by at least `min_iou`."""
        regions = output.refined_regions
        is_candidate = regions.attention_mask & (regions.row >= 0) & (regions.image_slot == 0)
        iou = torch.vmap(pairwise_iou)(regions.boxes[named.owner], named.boxes[:, None])[..., 0]  # [B, R]
        best_iou, best_region = iou.masked_fill(~is_candidate[named.owner], -1.0).max(dim=1)
        rois = rois_of(output, named.owner, best_region)
        logits = detector.mask_logits(output.regions.maps, rois, region_classes[named.owner, best_region])
        losses = mask_losses(logits, crop_masks(named.masks, rois[:, 1:], logits.shape[-1]))
        fits = best_iou >= self.min_iou
        return Loss((losses * fits).sum(), fits.sum().float())


def rois_of(output: ModelOutput, texts: Int64[Tensor, " B"], rows: Int64[Tensor, " B"]) -> Float[Tensor, "B 5"]:
    """Return [image, x1, y1, x2, y2] of regions, by their texts and their rows among the regions of these."""
    regions = output.refined_regions
    images = regions.image[texts, rows].clamp(min=0)
    boxes = regions.boxes[texts, rows]
    return torch.cat([images[:, None].to(boxes), boxes], dim=1)

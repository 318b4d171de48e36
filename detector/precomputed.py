"""A detector that computes nothing: it returns features that came with the images.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from detector.boxes import prepend, whole_image_boxes
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.structures import DetectionTargets, Detector, ImageBatch, Regions


class PrecomputedDetector(Detector):
    """Regions with the features in `ImageBatch.precomputed`; it has no parameters and cannot be trained.

    Args:
        config: settings of the detector that made the features: their width and the number of classes follow from it.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        self.map_size = None

    def recompute_activations(self) -> None:
        """There are no activations to keep."""

    def forward(
        self,
        images: ImageBatch,
        boxes: list[Float[Tensor, "_R 4"]] | None = None,
        targets: DetectionTargets | None = None,
        *,
        pixel_masks: list[Float[Tensor, "_Q 4"]] | None = None,
        roi_masks: list[Float[Tensor, "_R S S"]] | None = None,
        whole_image: bool = False,
    ) -> Regions:
        """See `Detector.forward`; `boxes` are the boxes that the features belong to, row by row.

        The class logits have no column: feature files do not hold them.

        Raises:
            ValueError: no features, features of a different width or number, or an argument for networks only.
        """
        if targets is not None or pixel_masks is not None or roi_masks is not None:
            raise UserError(
                "Precomputed features have no detection losses and no pixel or RoI masks; use the built-in detector."
            )
        if images.precomputed is None or boxes is None:
            raise UserError(
                "The images come without precomputed features; set the box source to precomputed, or "
                "detector.backend to builtin."
            )
        features = images.precomputed.features
        for rows, image_boxes, name in zip(features, boxes, images.names, strict=True):
            if len(rows) != len(image_boxes) or (len(rows) and rows.shape[1] != self.feature_dim):
                raise UserError(
                    f"{name}: precomputed features {list(rows.shape)} for {len(image_boxes)} boxes, but width "
                    f"{self.feature_dim} in the detector's config; use the config that they were made with."
                )
        features = [rows.reshape(len(rows), self.feature_dim) for rows in features]
        if whole_image:
            whole = images.precomputed.image_features
            if whole is None:
                raise UserError(
                    "The encoder needs the feature of the whole image; extract the features with --image-feature."
                )
            boxes = prepend(whole_image_boxes(images.sizes), boxes)
            features = prepend(list(whole[:, None]), features)
        return Regions(boxes=boxes, features=features, class_logits=[rows.new_zeros(len(rows), 0) for rows in features])

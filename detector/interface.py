"""The one interface of every detector: images (and boxes) in, `Regions` out.

Shape legend: see `detector/structures.py`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from detector.errors import UserError
from detector.structures import DetectionTargets, ImageBatch, Regions


class Detector(nn.Module, abc.ABC):
    """images (+ boxes) -> regions with differentiable features, and detection losses from the same backbone pass."""

    config_class: ClassVar[type]  # of the constructor's one argument; it has `from_yaml`, `to_yaml` and `input`
    feature_dim: int  # D
    num_classes: int  # K
    class_names: tuple[str, ...] | None = None  # of the classes 0 .. K-1; None: unknown
    map_size: int | None = None  # S of the RoI masks; None where it is unknown before a map is computed
    reads_classes: ClassVar[bool] = False  # `forward` also takes `box_classes`, N entries, the class of each given box

    def recompute_activations(self) -> None:
        """Save memory in training: compute activations again in the backward pass instead of keeping them.

        Raises:
            ValueError: this detector cannot do that.
        """
        raise UserError(
            f"{type(self).__name__} has no activation checkpointing; switch train.activation_checkpointing off or use "
            "detector.backend builtin."
        )

    @abc.abstractmethod
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
        """One backbone pass over all images.

        Args:
            images: N resized and normalised images.
            boxes: N entries, the boxes to describe (R may be 0), or None: the detector proposes them itself. Without
                boxes, in training mode with `targets`, the regions are the RoIs that the box head was trained on in
                this step (sampled proposals with the annotated boxes appended, Faster R-CNN section 3.2); otherwise
                they are the detector's final detections, best score first, found as in evaluation also in training
                mode.
            targets: annotated objects; adds `loss_rpn_cls`, `loss_rpn_loc`, `loss_cls`, `loss_box_reg` (and
                `loss_attribute` with an attribute head) to the result.
            pixel_masks: N entries, boxes whose pixels become 0 in the network input (that is the mean colour) before
                the backbone sees them.
            roi_masks: N entries, instance masks in 0..1 that multiply the last RoI map: the output of res5 before it is
                averaged (the divisor stays S * S, as in VL-BERT on VCR), or the pooled map before a box head; other
                networks may read them otherwise. Only together with `boxes`.
            whole_image: put the box [0, 0, width - 1, height - 1] in front of each image's regions as row 0.

        Raises:
            ValueError: a box that is not finite or has no area; the message names the image and the row.
        """


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every part is in the mode that it was in."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training

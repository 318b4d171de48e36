"""Box predictor: class logits, box deltas and, optionally, attribute logits of the feature of a RoI.

Shape legend
    J  RoIs of all images, joined; rows are [image, x1, y1, x2, y2]
    K  foreground classes; K is also the label of the background
    A  attributes
    T  attribute slots of an object

`head_dim` is the width of the predictor's input, see `detector.roi_features`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from detector.box_losses import box_regression_loss
from detector.config_groups import AttributeConfig, ROIHeadsConfig
from detector.structures import Loss


class AttributeHead(nn.Module):
    """Adds bottom-up attention's attribute head (Anderson et al., section 3.1) to a box predictor of either backend.

    An embedding of the class is joined to the feature, then come a hidden layer and the attribute scores; names
    `cls_embedding`, `fc_attr`, `attr_score`.
    """

    num_classes: int  # K
    cls_score: nn.Linear
    attribute_config: AttributeConfig

    def class_logits(self, features: Float[Tensor, "J head_dim"]) -> Float32[Tensor, "J K_plus_1"]:
        return self.cls_score(features).float()

    def add_attribute_layers(self, feature_dim: int, config: AttributeConfig) -> None:
        """Create the layers for features of width `feature_dim`, unless the config has no attributes."""
        self.attribute_config = config
        if self.has_attributes:
            self.cls_embedding = nn.Embedding(self.num_classes + 1, config.embedding_dim)
            self.fc_attr = nn.Linear(feature_dim + config.embedding_dim, config.hidden_dim)
            self.attr_score = nn.Linear(config.hidden_dim, config.num_classes + 1)
            nn.init.normal_(self.cls_embedding.weight, std=0.01)
            nn.init.normal_(self.attr_score.weight, std=0.01)
            nn.init.zeros_(self.attr_score.bias)

    @property
    def has_attributes(self) -> bool:
        return self.attribute_config.num_classes > 0

    def attributes(
        self, features: Float[Tensor, "J head_dim"], classes: Int64[Tensor, " J"]
    ) -> Float32[Tensor, "J A_plus_1"]:
        """Attribute logits of features for the classes 0 .. K (K = background)."""
        joined = torch.cat((features, self.cls_embedding(classes).to(features.dtype)), dim=1)
        return self.attr_score(F.relu(self.fc_attr(joined))).float()

    def attribute_loss(
        self, features: Float[Tensor, "J head_dim"], classes: Int64[Tensor, " J"], labels: Int64[Tensor, "J T"]
    ) -> Loss:
        """Cross entropy averaged over an object's labels, summed over the foreground RoIs that have any.

        Args:
            classes: target class, K = background; its embedding is the head's second input.
            labels: attributes of the object that a RoI is matched with, -1 = none in this slot.
        """
        labelled = ((classes < self.num_classes) & (labels >= 0).any(dim=1)).nonzero()[:, 0]
        labels = labels[labelled]
        log_probs = self.attributes(features[labelled], classes[labelled]).log_softmax(dim=1)
        is_label = labels >= 0
        picked = -log_probs.gather(1, labels.clamp(min=0)) * is_label
        total = (picked.sum(dim=1) / is_label.sum(dim=1)).sum() * self.attribute_config.loss_weight
        return Loss(total, total.detach().new_tensor(float(len(labelled))))


class BoxPredictor(AttributeHead):
    """Linear layers on the feature of a RoI (Fast R-CNN, section 2), named as in Detectron2."""

    def __init__(self, feature_dim: int, config: ROIHeadsConfig, attributes: AttributeConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.cls_score = nn.Linear(feature_dim, config.num_classes + 1)
        self.bbox_pred = nn.Linear(feature_dim, 4 * (1 if config.class_agnostic_boxes else config.num_classes))
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)
        self.add_attribute_layers(feature_dim, attributes)

    def forward(
        self, features: Float[Tensor, "J head_dim"]
    ) -> tuple[Float32[Tensor, "J K_plus_1"], Float32[Tensor, "J deltas"]]:
        """Class logits, and box deltas in 4 * K columns (or 4 if class-agnostic)."""
        return self.class_logits(features), self.bbox_pred(features).float()

    def box_losses(
        self,
        logits: Float[Tensor, "J K_plus_1"],
        deltas: Float[Tensor, "J deltas"],
        boxes: Float[Tensor, "J 4"],
        classes: Int64[Tensor, " J"],
        matched_boxes: Float[Tensor, "J 4"],
    ) -> dict[str, Loss]:
        """`loss_cls` and `loss_box_reg`, both divided by the number of RoIs.

        Args:
            logits, deltas: as `forward` returns them.
            boxes: the RoIs.
            classes: target class, K = background.
            matched_boxes: the annotated box of each foreground RoI (any value for background).
        """
        foreground = (classes < self.num_classes).nonzero()[:, 0]
        per_class = deltas.unflatten(1, (-1, 4))
        column = torch.zeros_like(foreground) if self.config.class_agnostic_boxes else classes[foreground]
        reg = box_regression_loss(
            per_class[foreground, column],
            boxes[foreground],
            matched_boxes[foreground],
            weights=self.config.box_weights,
            kind=self.config.box_loss_type,
            smooth_l1_beta=self.config.smooth_l1_beta,
        )
        count = reg.new_tensor(float(len(classes)))
        return {
            "loss_cls": Loss(F.cross_entropy(logits, classes, reduction="sum"), count),
            "loss_box_reg": Loss(reg * self.config.box_loss_weight, count),
        }

"""Box refinement, in addition to any task: moves the regions onto the objects that texts name.

The deltas are those of Detectron2's class-agnostic box head (parametrisation, weights and initialisation), computed
from the last hidden state of each region and from its feature. (From the hidden state alone they are learned later, see
docs/refinement.md.) So the answer is no longer bounded by the proposals.

Shape legend: see `e2e_vl/structures.py`; and here
    B   boxes that the texts of the batch name
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from detector.boxes import box_regression_loss, decode_deltas, pairwise_iou
from detector.structures import Loss
from e2e_vl.structures import Batch, EncoderOutput, RefinementOutput, TextRegions, at_least_float32
from e2e_vl.targets import Ragged
from e2e_vl.tasks.base import Head, Transform

DELTA_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # of dx, dy, dw, dh; Detectron2's BBOX_REG_WEIGHTS of the box head
OUTPUT_STD = 0.001  # of the initial weights of the last layer, as in Detectron2: boxes begin almost unmoved
REFINEMENT = "box_refinement"  # the name of the loss


class BoxRefinementHead(nn.Module):
    """Predicts four deltas from the last hidden state and the feature of each region, with one hidden layer.

    Args:
        hidden_size: E.
        feature_dim: D.
        loss: "smooth_l1" compares deltas, by plain L1 as in Detectron2; "giou", "diou" and "ciou" compare boxes.
        min_iou: a region learns to move onto a box that a text names from this IoU on.
    """

    def __init__(self, hidden_size: int, feature_dim: int, loss: str = "smooth_l1", min_iou: float = 0.5):
        super().__init__()
        self.loss = loss
        self.min_iou = min_iou
        self.feature_norm = nn.LayerNorm(feature_dim)
        transform = Transform(hidden_size + feature_dim, width=hidden_size)
        self.deltas = Head(hidden_size, 4, 0.0, "official", transform=transform)
        nn.init.normal_(self.deltas.output.weight, std=OUTPUT_STD)

    def forward(self, batch: Batch, text_regions: TextRegions, encoded: EncoderOutput) -> RefinementOutput:
        """Move the regions of M texts that lie in their first images; whole images stay.

        Returns:
            The moved boxes, clipped to their images, and the loss `box_refinement` if the batch has boxes that texts
            name. Its count is the number of pairs of a region and the named box that it overlaps most. A box that a
            text names twice, as a whole and in a phrase, counts twice.
        """
        states = torch.cat([encoded.regions, self.feature_norm(text_regions.features)], dim=-1)
        deltas = at_least_float32(self.deltas(states))
        candidates = text_regions.attention_mask & (text_regions.row >= 0) & (text_regions.image_slot == 0)
        moved = decode_deltas(deltas.detach(), text_regions.boxes, DELTA_WEIGHTS)
        corner = text_regions.image_sizes.flip(-1).repeat(1, 1, 2)  # width, height, width, height
        moved = torch.minimum(moved.clamp(min=0), corner.to(moved))
        losses = {}
        named_boxes = find_named_boxes(batch)
        if named_boxes:
            owner = torch.cat([boxes.owner for boxes in named_boxes])
            targets = torch.cat([boxes.values.to(text_regions.boxes) for boxes in named_boxes])
            losses[REFINEMENT] = self._loss(deltas, text_regions.boxes, candidates, targets, owner)
        return RefinementOutput(torch.where(candidates[..., None], moved, text_regions.boxes), losses)

    def _loss(
        self,
        deltas: Float[Tensor, "M R 4"],
        boxes: Float[Tensor, "M R 4"],
        candidates: Bool[Tensor, "M R"],
        targets: Float[Tensor, "B 4"],
        owner: Int64[Tensor, " B"],
    ) -> Loss:
        """Return the loss of all pairs of a region and the named box that it overlaps most, by at least `min_iou`."""
        iou = torch.vmap(pairwise_iou)(boxes[owner], targets[:, None])[..., 0]  # [B, R]
        best = torch.zeros_like(boxes[..., 0]).scatter_reduce(0, owner[:, None].expand_as(iou), iou, "amax")
        fits = (iou >= self.min_iou) & (iou == best[owner]) & candidates[owner]
        box, region = fits.nonzero(as_tuple=True)
        text = owner[box]
        total = box_regression_loss(
            deltas[text, region],
            boxes[text, region],
            targets[box],
            weights=DELTA_WEIGHTS,
            kind=self.loss,
            smooth_l1_beta=0.0,
        )
        return Loss(total, total.new_tensor(float(len(box))))


def find_named_boxes(batch: Batch) -> list[Ragged]:
    """Return the boxes that the M texts name as wholes and in phrases, each with a list per text; empty: unknown."""
    named_boxes = []
    if batch.targets is not None:
        named_boxes.append(batch.targets.named_boxes())
    if batch.phrases is not None:
        named_boxes.append(batch.phrases.named_boxes())
    return [boxes for boxes in named_boxes if boxes is not None]

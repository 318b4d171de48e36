"""torchvision's operators: the same rows and boxes as its own functions, and what does not import its package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torchvision import ops

from detector.operators import batched_nms, clip_boxes_to_image, nms

WITHOUT_COMPILER = """
import sys
import detector.faster_rcnn, e2e_vl.api.detector, e2e_vl.data.batching, e2e_vl.extraction.bulk
import torch
from detector.operators import nms

boxes = torch.tensor([[0.0, 0, 8, 8], [0, 0, 8, 7], [20, 20, 30, 30]])
scores = torch.tensor([0.5, 0.9, 0.1])
assert nms(boxes, scores, 0.5).tolist() == [1, 2]
assert not {"torchvision", "torch._dynamo", "transformers.modeling_utils"} & sys.modules.keys()


class Suppress(torch.nn.Module):
    def forward(self, boxes, scores):
        return boxes[nms(boxes, scores, 0.5)]


program = torch.export.export(Suppress(), (boxes, scores)).module()
assert program(boxes, scores).equal(boxes[[1, 2]])

from detector.boxes import box_regression_loss
from detector.roi_pooler import align_rois

maps = torch.ones(1, 2, 6, 6, requires_grad=True)
align_rois(maps, torch.zeros(0, 5), 3, 1.0, sampling_ratio=2, aligned=True).sum().backward()  # torchvision's operator
assert maps.grad.shape == maps.shape
options = {"weights": (1, 1, 1, 1), "kind": "giou", "smooth_l1_beta": 0.0}
assert box_regression_loss(torch.zeros(3, 4), boxes, boxes, **options) < 1e-5
"""


def draw_boxes(count: int) -> torch.Tensor:
    corners = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(count)) * 100
    return torch.cat((corners.amin(dim=1), corners.amax(dim=1)), dim=1)


@pytest.mark.parametrize("count", [0, 1, 300, 1500])
def test_suppression_keeps_the_same_rows(count: int) -> None:
    """1,500 boxes are more than one call takes."""
    boxes = draw_boxes(count)
    draw = torch.Generator().manual_seed(1)
    scores = torch.rand(count, generator=draw)
    groups = torch.randint(5, (count,), generator=draw)
    assert batched_nms(boxes, scores, groups, 0.4).equal(ops.batched_nms(boxes, scores, groups, 0.4))
    assert nms(boxes, scores, 0.4).equal(ops.nms(boxes, scores, 0.4))
    assert nms(boxes.bfloat16(), scores.bfloat16(), 0.4).equal(
        ops.nms(boxes.bfloat16().float(), scores.bfloat16().float(), 0.4)
    )


def test_boxes_are_clipped_alike() -> None:
    boxes = draw_boxes(20) * 2 - 50
    assert clip_boxes_to_image(boxes, (60, 90)).equal(ops.clip_boxes_to_image(boxes, (60, 90)))
    assert clip_boxes_to_image(boxes[None], (60, 90)).equal(ops.clip_boxes_to_image(boxes[None], (60, 90)))


def test_a_detector_starts_without_the_compiler() -> None:
    """`torchvision` imports it, and a command without an encoder needs neither; what needs them still works."""
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True, timeout=300)

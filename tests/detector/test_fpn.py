from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detector.config import DetectorConfig
from detector.fpn import FPN

STAGES = ["res2", "res3", "res4", "res5"]


def make(stages: list[str] = STAGES, **keys) -> FPN:
    flat = {
        "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone",
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.RESNETS.DEPTH": 18,
        "MODEL.RESNETS.NORM": "GN",
        "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 8,
        "MODEL.RESNETS.OUT_FEATURES": STAGES,
        "MODEL.FPN.IN_FEATURES": stages,
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.RPN.IN_FEATURES": ["p5"],
        "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
        "MODEL.ROI_HEADS.IN_FEATURES": ["p5"],
        "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
        "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    }
    torch.manual_seed(0)
    return FPN(DetectorConfig.from_flat(flat | keys))


@pytest.mark.parametrize("fuse", ["sum", "avg"])
@torch.no_grad()
def test_levels_are_sums_from_the_top_down(fuse: str):
    model = make(**{"MODEL.FPN.FUSE_TYPE": fuse}).eval()
    pixels = torch.randn(1, 3, 64, 96)
    maps, below = model(pixels), model.bottom_up(pixels)
    assert list(maps) == ["p2", "p3", "p4", "p5", "p6"]
    assert [list(level.shape[1:]) for level in maps.values()] == [
        [16, 16, 24],
        [16, 8, 12],
        [16, 4, 6],
        [16, 2, 3],
        [16, 1, 2],
    ]
    top = model.fpn_lateral5(below["res5"])
    torch.testing.assert_close(maps["p5"], model.fpn_output5(top))
    larger = top.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    merged = (model.fpn_lateral4(below["res4"]) + larger) / (2 if fuse == "avg" else 1)
    torch.testing.assert_close(maps["p4"], model.fpn_output4(merged))
    torch.testing.assert_close(maps["p6"], maps["p5"][:, :, ::2, ::2])


def test_fewer_inputs_give_fewer_levels():
    model = make(STAGES[1:])
    assert not hasattr(model, "fpn_lateral2")
    assert list(model(torch.randn(1, 3, 32, 32))) == ["p3", "p4", "p5", "p6"]


def test_a_norm_takes_the_place_of_the_bias():
    names = {name for name in make(**{"MODEL.FPN.NORM": "GN"}).state_dict() if name.startswith("fpn_output2")}
    assert names == {"fpn_output2.weight", "fpn_output2.norm.weight", "fpn_output2.norm.bias"}
    assert {name for name in make().state_dict() if name.startswith("fpn_lateral2")} == {
        "fpn_lateral2.weight",
        "fpn_lateral2.bias",
    }


@pytest.mark.parametrize("depth", [18, 34])
def test_shallow_networks_have_basic_blocks_in_all_stages(depth: int):
    res5 = make(**{"MODEL.RESNETS.DEPTH": depth}).bottom_up.res5
    assert len(res5) == {18: 2, 34: 3}[depth]
    assert all(not hasattr(block, "conv3") for block in res5)


def test_the_gradient_of_every_level_reaches_the_stem():
    model = make()
    for name in ("p2", "p3", "p4", "p5", "p6"):
        model.zero_grad()
        F.relu(model(torch.randn(1, 3, 64, 64))[name]).sum().backward()
        assert model.bottom_up.stem.conv1.weight.grad.any(), name

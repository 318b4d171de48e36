"""The RoI head: RoIs in chunks."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from detector import roi_heads
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN

STYLES = {
    "pooled_after": {},  # bottlenecks, whose 1x1 convolutions come before the pooling
    "dilated": {"MODEL.RESNETS.RES5_DILATION": 2},
    "pool": {"MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIPool"},
    "basic": {"MODEL.RESNETS.DEPTH": 18},
}


def make_detector(published: ModuleType, style: str, **more: int) -> FasterRCNN:
    flat = DetectorConfig.from_yaml(published.WITHOUT_ATTRIBUTES).to_flat()
    flat |= {"MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2", "MODEL.RESNETS.RES5_DILATION": 1}
    torch.manual_seed(0)
    return FasterRCNN(DetectorConfig.from_flat(flat | STYLES[style] | more)).eval()


@pytest.fixture(params=STYLES)
def heads(request: pytest.FixtureRequest, published: ModuleType) -> roi_heads.Res5ROIHeads:
    return make_detector(published, request.param).roi_heads


@pytest.mark.parametrize("resolution", [7, 14])
@pytest.mark.parametrize("style", STYLES)
def test_the_side_of_the_last_map_is_known_before_it_is_there(published, style, resolution):
    detector = make_detector(published, style, **{"MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": resolution})
    with torch.no_grad():
        maps = detector.roi_heads.res5_map(torch.zeros(1, 32, 4, 4), torch.tensor([[0.0, 0, 0, 30, 30]]))
    assert detector.map_size == maps.shape[2] == maps.shape[3]


@pytest.mark.parametrize("with_masks", [False, True])
def test_chunks_give_the_same_features(heads, with_masks: bool, monkeypatch: pytest.MonkeyPatch):
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
        with pytest.raises(ValueError, match="RoI masks have shape"):
            heads.describe(features, rois, torch.ones(22, side, side))
        heads.train()  # batch norms see all RoIs
        heads.describe(features, rois, masks)
    heads.eval()
    heads.describe(features, rois, masks)  # what the backward pass needs is kept anyway
    assert seen[-2:] == [23, 23]

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from detector.config import BOX_HEAD, BoxHeadConfig
from detector.roi_heads import BoxHead

SIDE = 3


def make(**options) -> BoxHead:
    torch.manual_seed(0)
    return BoxHead(BoxHeadConfig(name=BOX_HEAD, fc_dim=10, conv_dim=6, **options), in_channels=4, side=SIDE)


def test_names_and_shapes_are_detectron2s():
    shapes = {name: list(value.shape) for name, value in make(num_conv=2, num_fc=2).state_dict().items()}
    assert shapes == {
        "conv1.weight": [6, 4, 3, 3],
        "conv1.bias": [6],
        "conv2.weight": [6, 6, 3, 3],
        "conv2.bias": [6],
        "fc1.weight": [10, 6 * SIDE**2],
        "fc1.bias": [10],
        "fc2.weight": [10, 10],
        "fc2.bias": [10],
    }
    assert set(make(num_conv=1, norm="GN").state_dict()) == {"conv1.weight", "conv1.norm.weight", "conv1.norm.bias"}


@pytest.mark.parametrize("feature", ["head", "fc6", "fc7", "mean"])
def test_the_region_feature_is_a_choice_and_the_predictor_reads_the_last_layer(feature: str):
    head = make(num_fc=2, region_feature=feature)
    maps = torch.randn(5, 4, SIDE, SIDE)
    fc6 = F.relu(head.fc1(maps.flatten(1)))
    fc7 = F.relu(head.fc2(fc6))
    found = head(maps)
    torch.testing.assert_close(found.predictor, fc7)
    expected = {"head": fc7, "fc7": fc7, "fc6": fc6, "mean": maps.mean(dim=(2, 3))}[feature]
    torch.testing.assert_close(found.region, expected)
    assert (found.region is found.predictor) == (feature in ("head", "fc7"))


def test_without_fully_connected_layers_the_map_is_flattened():
    head = make(num_conv=1)
    maps = torch.randn(2, 4, SIDE, SIDE)
    torch.testing.assert_close(head(maps).predictor, F.relu(head.conv1(maps)).flatten(1))
    assert head.predictor_dim == 6 * SIDE**2

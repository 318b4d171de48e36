from __future__ import annotations

import torch

from detector.structures import RoIFeatures


def test_the_rows_of_both_features_stay_together():
    region, predictor = torch.arange(4.0)[:, None], torch.arange(8.0).reshape(4, 2)
    parts = RoIFeatures(region, predictor).split([1, 3])
    assert torch.equal(parts[1].predictor, predictor[1:])
    joined = RoIFeatures.join(parts[::-1])
    assert joined.region[:, 0].tolist() == [1, 2, 3, 0]
    assert joined.predictor[:, 0].tolist() == [2, 4, 6, 0]
    same = RoIFeatures(region, region)
    for one in (*same.split([1, 0, 3]), RoIFeatures.join(same.split([4])), same.apply(lambda values: values * 2)):
        assert one.region is one.predictor, "one tensor stays one tensor"

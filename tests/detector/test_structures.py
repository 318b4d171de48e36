from __future__ import annotations

import torch

from detector.structures import RoIFeatures


def test_one_tensor_stays_one_tensor():
    rows = torch.arange(12.0).reshape(6, 2)
    same = RoIFeatures(rows, rows)
    parts = same.split([2, 0, 4])
    assert [len(part.region) for part in parts] == [2, 0, 4]
    joined = RoIFeatures.join(parts)
    for one in (*parts, joined, same.apply(lambda values: values * 2)):
        assert one.region is one.predictor
    assert torch.equal(joined.region, rows)


def test_two_tensors_keep_their_rows_together():
    region, predictor = torch.arange(4.0)[:, None], torch.arange(8.0).reshape(4, 2)
    parts = RoIFeatures(region, predictor).split([1, 3])
    assert torch.equal(parts[1].predictor, predictor[1:])
    joined = RoIFeatures.join(parts[::-1])
    assert joined.region[:, 0].tolist() == [1, 2, 3, 0]
    assert joined.predictor[:, 0].tolist() == [2, 4, 6, 0]

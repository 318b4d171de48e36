"""The best rules of a split, from the file beside the data."""

from __future__ import annotations

import json

from e2e_vl.metrics.baselines import FILE, best_baselines


def test_the_best_rule_of_all_and_of_each_family(tmp_path):
    (tmp_path / "refcoco+").mkdir()
    rules = {"near": 0.3, "big": 0.4, "relation/near": 0.6, "relation/big": 0.5}
    (tmp_path / "refcoco+" / FILE).write_text(json.dumps({"val": rules, "train": {"near": 0.9}}))
    expected = {"best_shortcut/big": 0.4, "best_shortcut/relation/near": 0.6}
    assert best_baselines(tmp_path, "refcoco", "val") == best_baselines(tmp_path, "refcoco", "val_all") == expected
    assert best_baselines(tmp_path, "refcoco", "test") == best_baselines(tmp_path, "coco", "val") == {}

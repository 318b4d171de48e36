"""`e2e-vl synthesize`: what is drawn follows from the options."""

from __future__ import annotations

import json

from e2e_vl.cli import make_synthetic as tool


def test_options_say_what_is_drawn(tmp_path, capsys):
    words = f"--output {tmp_path / 'data'} --train 3 --val 1 --testA 1 --testB 1 --max-objects 6".split()
    words += ["--families", "attribute=0.5", "relation=0.5"]
    assert tool.main(words) == 0
    statistics = json.loads(capsys.readouterr().out)
    assert statistics["images"] == {"train": 3, "val": 1, "testA": 1, "testB": 1}
    assert set(statistics["families"]) <= {"attribute", "relation"}
    assert 5 <= statistics["objects_per_image"] <= 6

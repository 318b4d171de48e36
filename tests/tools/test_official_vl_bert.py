"""Inputs of the official VL-BERT code, and how its steps are measured; the code itself is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmark
import official_vl_bert
from detector.errors import MissingFileError
from detector.structures import ImageBatch
from e2e_vl.structures import Batch, TextBatch
from tests.conftest import ROOT

RUN = ROOT / "configs" / "tiny" / "refcoco.yaml"


def test_inputs_have_the_numbers_of_the_batch():
    sizes = torch.tensor([[20, 30], [10, 40]])
    images = ImageBatch(torch.zeros(2, 3, 20, 40, dtype=torch.uint8), sizes, sizes, ["a", "b"])
    ids = torch.tensor([[101, 7, 8, 102, 3], [101, 9, 102, 0, 0]])
    texts = TextBatch(ids, torch.zeros_like(ids), ids > 0)
    boxes = [torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 9.0, 9.0]]), torch.tensor([[5.0, 5.0, 6.0, 6.0]])]
    batch = Batch(images, boxes, texts, torch.tensor([[0], [1]]))
    pixels, all_boxes, image_sizes, words, labels = official_vl_bert.official_inputs(batch, torch.device("cpu"))
    assert pixels.shape == (2, 3, 20, 40) and pixels.dtype == torch.float32
    assert all_boxes[0].tolist() == [[0, 0, 29, 19], *boxes[0].tolist()]
    assert all_boxes[1].tolist() == [[0, 0, 39, 9], *boxes[1].tolist(), [-2] * 4]
    assert image_sizes.tolist() == [[30, 20, 1, 1], [40, 10, 1, 1]]
    assert words.tolist() == [[7, 8, 102], [9, 0, 0]]
    assert labels.tolist() == [[0, 1, 0], [0, 1, -1]]


class OneWeight(nn.Module):
    """Stands for the official model; counts the expressions that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.expressions = 0

    def forward(self, images, boxes, sizes, words, labels):
        self.expressions += len(words)
        return {}, self.weight * boxes.mean()


def test_steps_take_turns(monkeypatch, tiny_words, tmp_path):
    model = OneWeight()
    monkeypatch.setattr(benchmark, "best_rates", lambda *_: {"matrix product": 0.5})
    monkeypatch.setattr(official_vl_bert, "build_official_model", lambda checkout: model)
    output = tmp_path / "result.json"
    words = ("official", "--checkout", str(tmp_path), "--config", str(RUN), "--repetitions", "1", "--clock", "cpu")
    settings = ("data.boxes.train=gt", "data.texts_per_image=3", "train.images_per_batch=2")
    assert benchmark.main([*words, "--device", "cpu", "--output", str(output), *tiny_words, *settings]) == 0
    step = json.loads(output.read_text(encoding="utf-8"))["cases"]["step"]
    assert list(step) == ["grouped", "official"]
    assert model.expressions == 3 * 6, "counted, the first one, and one that is timed"


def test_a_missing_checkout_is_named(tmp_path, tiny_words, capsys):
    with pytest.raises(MissingFileError, match="VL-BERT"):
        official_vl_bert.build_official_model(Path(tmp_path))
    assert benchmark.main(["official", "--config", str(RUN), *tiny_words]) == 2
    assert "--checkout" in capsys.readouterr().err

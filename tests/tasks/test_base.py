"""What tasks share: the start of their heads, and pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from e2e_vl import parts
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.tasks.base import Sizes, Task
from e2e_vl.tasks.config import ReferringConfig, VCRConfig, VQAConfig
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.tasks.vcr import VCRTask
from e2e_vl.tasks.vqa import VQATask

H = 400
TASKS = {
    "refcoco": lambda **options: ReferringTask(H, ReferringConfig(**options)),
    "vqa": lambda **options: VQATask(H, VQAConfig(answers=[str(number) for number in range(50)], **options)),
    "vcr": lambda **options: VCRTask(H, VCRConfig(**options)),
}


def linears(name: str, **options) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    head = TASKS[name](**options).head.requires_grad_(False)
    return [module for module in head.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("name", TASKS)
def test_heads_start_as_in_the_official_code_or_as_in_the_paper(name):
    official, normal = linears(name), linears(name, new_layers="normal")
    assert len(official) == len(normal) == (1 if name == "vcr" else 2)
    for linear in official:
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5  # Xavier uniform
        assert 0.95 * bound < linear.weight.abs().max() <= bound
    for linear in normal:
        assert linear.weight.std() == pytest.approx(0.02, rel=0.15)
        assert linear.weight.mean().abs() < 0.005
    assert all(linear.bias.abs().sum() == 0 for linear in official + normal)


@pytest.mark.parametrize("name", ["vqa", "vcr"])
def test_heads_on_the_summary_have_its_width(name):
    config_class, task_class = parts.TASKS[name].config_class, parts.TASKS[name].cls
    config = VQAConfig(answers=["yes", "no"]) if name == "vqa" else config_class()
    task = task_class.build(Sizes(hidden_size=8, vocab_size=9, summary_size=24), config)
    assert task.head.output.in_features == 24
    if name == "vcr":
        assert task.region_classifier.output.in_features == 8
    own = task_class.build(Sizes(hidden_size=8, vocab_size=9), config)
    assert own.head.output.in_features == 8


@pytest.fixture
def grey(tmp_path: Path) -> str:
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((60, 90), 200, np.uint8))
    return str(tmp_path / "grey.png")


def test_phrases_of_an_answer_in_words_are_drawn(grey):
    clear, unsure, nowhere = (
        GroundedPhrase("a cat", (0, 5), box, score)
        for box, score in (((5, 5, 40, 40), 0.9), ((5, 5, 40, 40), 0.2), (None, 0.2))
    )

    def draw(*phrases: GroundedPhrase, correct: float | None = None) -> np.ndarray:
        return Task.draw(None, Prediction(file_name=grey, grounded=phrases, correct=correct))

    assert (draw(clear) != draw()).any()
    for correct, is_drawn in ((0.0, True), (0.3, False), (1.0, False), (None, False)):
        assert (draw(nowhere, unsure, correct=correct) != draw()).any() == is_drawn


def test_a_task_shows_the_image_alone_unless_it_says_otherwise(grey):
    assert Task.draw(None, Prediction()) is None
    assert Task.draw(None, Prediction(file_name=grey)).shape == (320, 480, 3)
    with pytest.raises(FileNotFoundError, match="gone"):
        Task.draw(None, Prediction(file_name="gone.jpg"))

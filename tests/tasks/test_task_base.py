"""What tasks share: the start of their heads, and choices in their settings."""

from __future__ import annotations

import types

import pytest
import torch

from e2e_vl import parts
from e2e_vl.parts import decode
from e2e_vl.tasks.base import Sizes
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


def test_answers_start_from_words_of_their_width_only():
    task = VQATask.build(Sizes(hidden_size=8, vocab_size=9, summary_size=24), VQAConfig(answers=["yes"]))
    encoder = types.SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(9, 8))
    with pytest.raises(ValueError, match=r"width 8 and its summary 24, .* set task\.config\.initialise_from_words"):
        task.initialise(None, encoder, None)


@pytest.mark.parametrize(
    ("name", "setting", "choices"),
    [
        *((name, "new_layers", "official, normal") for name in TASKS),
        ("refcoco", "loss", "binary, softmax"),
        ("vqa", "loss", "binary, softmax"),
        ("pretraining", "teacher", "frozen, current, file"),
        ("pretraining", "masked_pixels", "mean, black"),
        ("pretraining", "background", "last, first"),
    ],
)
def test_values_are_among_the_choices(name, setting, choices):
    with pytest.raises(ValueError, match=rf"Invalid enum value 'other' - at `\$.{setting}`"):
        decode({setting: "other"}, parts.TASKS[name].config_class, "task.config")

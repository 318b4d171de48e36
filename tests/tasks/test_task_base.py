"""What tasks share: the start of their heads."""

from __future__ import annotations

import pytest
import torch

from e2e_vl.tasks.refcoco import ReferringConfig, ReferringTask
from e2e_vl.tasks.vcr import VCRConfig, VCRTask
from e2e_vl.tasks.vqa import VQAConfig, VQATask

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


@pytest.mark.parametrize("name", TASKS)
def test_an_unknown_start_is_an_error(name):
    with pytest.raises(ValueError, match='new_layers is "xavier"; it must be one of official, normal'):
        linears(name, new_layers="xavier")

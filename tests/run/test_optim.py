from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from detector.structures import Loss
from e2e_vl.config import TrainConfig
from e2e_vl.config_files import load_config
from e2e_vl.run.optim import BertAdam, build_optimizer, build_schedule, preview
from tests.run.runs import ROOT


def loss(total: float, count: float) -> Loss:
    return Loss(torch.tensor(total), torch.tensor(count))


class Parts(nn.Module):
    """What `build_optimizer` reads of a model."""

    phrase_head = None

    def __init__(self) -> None:
        super().__init__()
        self.detector = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.encoder = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        self.task = nn.Linear(4, 1)


def groups_of(model: Parts, **settings) -> dict[str, dict]:
    return {group["name"]: group for group in build_optimizer(model, TrainConfig(**settings)).param_groups}


def test_one_group_each_for_detector_encoder_and_head():
    model = Parts()
    groups = groups_of(model, lr=0.1, detector_lr=0.01, head_lr=0.5, weight_decay=0.3)
    assert {name: group["lr"] for name, group in groups.items()} == {"detector": 0.01, "encoder": 0.1, "head": 0.5}
    assert {group["weight_decay"] for group in groups.values()} == {0.3}
    for name, part in (("detector", model.detector), ("encoder", model.encoder), ("head", model.task)):
        assert {id(p) for p in groups[name]["params"]} == {id(p) for p in part.parameters()}


def test_sgd_moves_with_momentum():
    model = Parts()
    settings = TrainConfig(optimizer="sgd", lr=0.5, momentum=0.9, weight_decay=0.0)
    optimizer = build_optimizer(model, settings)
    start = model.task.bias.detach().clone()
    for _ in range(2):
        model.task.bias.grad = torch.ones(1)
        optimizer.step()
    assert model.task.bias.item() == pytest.approx(start.item() - 0.5 * (1 + 1.9))


def test_official_adamw_adds_epsilon_before_the_bias_correction_and_decays_after_the_update():
    model = Parts()
    settings = TrainConfig(optimizer="adamw_official", lr=0.1, betas=[0.9, 0.99], eps=0.5, weight_decay=0.3)
    optimizer = build_optimizer(model, settings)
    expected, mean, square = model.task.bias.item(), 0.0, 0.0
    for step, gradient in enumerate((2.0, -3.0, 0.5), start=1):
        model.task.bias.grad = torch.full((1,), gradient)
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        step_size = 0.1 * math.sqrt(1 - 0.99**step) / (1 - 0.9**step)
        expected -= step_size * mean / (math.sqrt(square) + 0.5)
        expected -= 0.1 * 0.3 * expected
        assert model.task.bias.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bn_scales", [False, True])
def test_norms_and_biases_can_be_left_undecayed(bn_scales):
    """And of those the scales of batch norms can decay."""
    model = Parts()
    groups = groups_of(model, weight_decay=0.3, decay_norm_and_bias=False, decay_bn_scales=bn_scales)
    assert set(groups) == {f"{part}{end}" for part in ("detector", "encoder", "head") for end in ("", "_no_decay")}
    decayed = {id(p) for name, group in groups.items() if group["weight_decay"] for p in group["params"]}
    of_detector = model.detector if bn_scales else model.detector[:1]
    assert decayed == {id(m.weight) for m in (*of_detector, *model.encoder[:2], model.task)}
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = Parts()
    model.detector.requires_grad_(False)
    model.encoder[0].requires_grad_(False)
    groups = groups_of(model)
    assert set(groups) == {"encoder", "head"}
    assert id(model.encoder[0].weight) not in {id(p) for p in groups["encoder"]["params"]}


def expected_factor(schedule: str, step: int) -> float:
    """Warm-up over 4 steps, 12 steps in all."""
    if step < 4:
        return step / 4
    if schedule == "constant":
        return 1.0
    if schedule == "steps":
        return 1.0 if step < 6 else 0.5 if step < 9 else 0.25
    progress = (step - 4) / (12 - 4)
    return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress


@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_ratio": 1 / 3}])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("schedule", ["linear", "triangle", "cosine", "constant", "steps"])
def test_schedule_warms_up_and_decays_and_can_go_on_anywhere(schedule, first, warmup):
    settings = TrainConfig(
        lr=0.5,
        head_lr=2.0,
        schedule=schedule,
        schedule_skips_zero=first,
        milestones=[0.5, 0.75] if schedule == "steps" else [],
        gamma=0.5,
        **warmup,
    )

    def rates(optimizer) -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    optimizer = build_optimizer(Parts(), settings)
    scheduler = build_schedule(optimizer, settings, 12)
    for step in range(12 if first else 13):
        factor = expected_factor(schedule, step + first)
        assert rates(optimizer) == pytest.approx([0.5 * factor, 0.5 * factor, 2.0 * factor], abs=1e-12)
        resumed = build_optimizer(Parts(), settings)
        build_schedule(resumed, settings, 12, steps_done=step)
        assert rates(resumed) == rates(optimizer)
        optimizer.step()
        scheduler.step()


def test_a_share_of_minus_one_falls_from_half_of_the_rate():
    settings = TrainConfig(lr=0.5, warmup_ratio=-1.0)
    optimizer = build_optimizer(Parts(), settings)
    build_schedule(optimizer, settings, 12, steps_done=3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * (1 - 3 / 12) / 2)


PAPER = ROOT / "configs" / "pretraining" / "lxmert_paper.yaml"


def schedule_of(steps: int, *words: str, config: str = "lxmert_paper") -> list[tuple[float, float, float]]:
    """Rate, and weights of question answering and of masked words, in each update."""
    names = "lr_encoder", "weight_image_qa", "weight_masked_words"
    found = load_config(PAPER.with_stem(config), ["data.root=DATA", *words])
    return [tuple(line[name] for name in names) for line in preview(found, steps)]


def test_the_schedule_of_lxmerts_paper():
    """20 epochs of 10 steps: up in the first one, then down; questions join after 10, at half of the rate."""
    whole = schedule_of(200)
    rates, questions, words = zip(*whole, strict=True)
    assert rates[:12] == pytest.approx([*(1e-5 * step for step in range(11)), 1e-4 * 189 / 190])
    assert rates[100] == pytest.approx(1e-4 * 100 / 190) and rates[199] == pytest.approx(1e-4 / 190)
    assert questions == (0.0,) * 100 + (2.0,) * 100 and set(words) == {1.0}
    halves = schedule_of(100, "train.schedule_fraction=[0, 0.5]") + schedule_of(100, config="lxmert_paper_answers")
    assert halves == whole


# BertAdam; tests/parity/*_adam_checks.py compare it with the official ones


def bert_adam(model: Parts, **settings) -> tuple[BertAdam, torch.optim.lr_scheduler.LambdaLR]:
    own = TrainConfig(**{"optimizer": "bert_adam", "schedule": "constant", **settings})
    optimizer = build_optimizer(model, own)
    assert isinstance(optimizer, BertAdam)
    return optimizer, build_schedule(optimizer, own, 8)


def test_bert_adam_has_no_bias_correction_and_decays_inside_the_update():
    model = Parts()
    optimizer, schedule = bert_adam(model, lr=0.1, betas=[0.9, 0.99], eps=0.5, weight_decay=0.3, warmup_ratio=0.25)
    expected, mean, square = model.task.bias.item(), 0.0, 0.0
    for step, gradient in enumerate((2.0, -3.0, 0.5, 1.0)):
        model.task.bias.grad = torch.full((1,), gradient)
        optimizer.step()
        schedule.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        rate = 0.1 * min(step / 2, 1)  # the first one is 0
        expected -= rate * (mean / (math.sqrt(square) + 0.5) + 0.3 * expected)
        assert model.task.bias.item() == pytest.approx(expected, rel=1e-6)


def test_bert_adam_clips_each_parameter_by_itself():
    model = Parts()
    optimizer, _ = bert_adam(model, max_grad_norm_per_tensor=1.0)
    model.task.weight.grad, model.task.bias.grad = torch.full((1, 4), 3.0), torch.full((1,), 0.25)
    optimizer.step()
    assert model.task.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert model.task.bias.grad.item() == 0.25
    assert optimizer.state[model.task.weight]["exp_avg"].tolist() == [pytest.approx([0.05] * 4, rel=1e-5)]


def test_the_operators_of_bert_adam_do_not_grow_with_the_parameters():
    """Most of them are launches on a GPU."""

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += not function.is_view
            return function(*args, **kwargs or {})

    numbers = []
    for count in (2, 9):
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
        optimizer = BertAdam([{"params": parameters}], (0.9, 0.99), 1e-6, max_grad_norm_per_tensor=1.0, fused=True)
        for _ in range(2):  # the first update makes the averages
            for parameter in parameters:
                parameter.grad = torch.ones(3)
            with Operators() as operators:
                optimizer.step()
        numbers.append(operators.number)
    assert numbers[0] == numbers[1], numbers


def test_a_parameter_without_a_gradient_is_left_alone_and_its_schedule_waits():
    model = Parts()
    optimizer, schedule = bert_adam(model, lr=0.1, schedule="linear", warmup_ratio=0.5, weight_decay=0.0)
    moved = []
    for step in range(4):
        before = model.task.bias.item()
        model.task.weight.grad = torch.ones(1, 4)
        model.task.bias.grad = None if step < 2 else torch.ones(1)
        optimizer.step()
        schedule.step()
        moved.append(abs(model.task.bias.item() - before))
    assert moved[:3] == [0.0, 0.0, 0.0] and moved[3] > 0  # its own first update has the rate 0
    ages = [optimizer.state[parameter]["step"] for parameter in (model.task.weight, model.task.bias)]
    assert ages == [4, 2]
    assert {id(parameter) for parameter in optimizer.state} == {id(model.task.weight), id(model.task.bias)}


def test_counts_of_updates_are_read_only_after_loading(monkeypatch):
    """On a GPU, where the fused optimiser has them, the host would wait."""
    reads = []
    real = torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: reads.append(tensor) or real(tensor))
    model = Parts()
    optimizer, _ = bert_adam(model)
    model.task.bias.grad = torch.ones(1)
    for _ in range(2):
        optimizer.step()
    assert not reads
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        optimizer.step()
    assert len(reads) == 1
    assert optimizer.state[model.task.bias]["step"] == 4


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_official", "bert_adam"])
def test_fp16_alone_has_no_fused_optimiser(optimizer):
    for precision in ("no", "bf16", "fp16"):
        settings = TrainConfig(optimizer=optimizer, mixed_precision=precision)
        groups = build_optimizer(Parts(), settings).param_groups
        assert {bool(group["fused"]) for group in groups} == {precision != "fp16"}


def test_bert_adam_follows_a_part_of_a_schedule():
    """The first update of the second half of 16 steps has the rate of step 8."""
    model = Parts()
    settings = TrainConfig(
        optimizer="bert_adam", lr=0.1, weight_decay=0.0, warmup_ratio=0.0, schedule_fraction=(0.5, 1.0)
    )
    optimizer = build_optimizer(model, settings)
    build_schedule(optimizer, settings, 8)
    before = model.task.bias.item()
    model.task.bias.grad = torch.ones(1)
    optimizer.step()
    assert before - model.task.bias.item() == pytest.approx(0.05 * 0.1 / math.sqrt(0.001), rel=1e-4)

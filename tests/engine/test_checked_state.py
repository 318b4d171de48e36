"""What a checkpoint from elsewhere holds; whole hostile files are in tests/campaign."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from detector.errors import UserError
from e2e_vl.run.checked_state import check_files, check_optimizer, checked_position, has_random_state
from e2e_vl.run.optim import BertAdam, OfficialAdamW

GOOD = {
    "processes": 2,
    "step": 4,
    "images_seen": 16,
    "loss_sums": {"loss": 1.5},
    "place": {"epoch": 0, "images": 16, "images_per_step": 4, "order": {"seed": 1}},
    "best": {"metric": None, "step": None, "value": None, "judged_step": None, "waited": 0},
    "checksums": "checksums.json",
}


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD(model.parameters(), lr=0.1),
        OfficialAdamW([{"params": model.parameters(), "lr": 0.1, "weight_decay": 0.0}], (0.9, 0.98), 1e-6),
        BertAdam([{"params": model.parameters(), "lr": 0.1, "weight_decay": 0.0}], (0.9, 0.98), 1e-6),
    ]


@pytest.mark.parametrize("number", range(5))
def test_what_our_optimisers_hold_is_accepted(number: int):
    model = nn.Linear(3, 2)
    optimizer = optimizers(model)[number]
    check_optimizer(optimizer, has_stepped=False)
    check_optimizer(stepped(optimizer, model), has_stepped=True)


def test_moments_that_cannot_be_are_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=r"optimizer\.bin holds no moments"):
        check_optimizer(optimizer, has_stepped=True)
    stepped(optimizer, model)
    values = optimizer.state[model.bias]
    for name, value, message in (
        ("exp_avg", torch.zeros(99), r"exp_avg of parameter 1 has the shape \[99\], expected \[2\]"),
        ("exp_avg_sq", torch.full((2,), float("inf")), "exp_avg_sq of parameter 1 is NaN or infinite"),
        ("step", float("nan"), "step of parameter 1 is NaN or infinite"),
        ("step", "many", "step of parameter 1 is a str"),
    ):
        kept, values[name] = values[name], value
        with pytest.raises(UserError, match=message):
            check_optimizer(optimizer, has_stepped=True)
        values[name] = kept


def test_files_that_cannot_be_are_refused(tmp_path: Path):
    save_file({"w": torch.zeros(2), "n": torch.arange(3)}, tmp_path / "model.safetensors")
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    check_files(tmp_path)
    (tmp_path / "sampler.bin").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"sampler\.bin: "):
        check_files(tmp_path)
    (tmp_path / "sampler.bin").unlink()
    save_file({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: w is NaN or infinite"):
        check_files(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"there is no model\.safetensors"):
        check_files(tmp_path)


def test_positions_stay_as_they_are():
    assert checked_position(GOOD, Path("step.json")) == GOOD
    assert checked_position({"processes": 1}, Path("step.json")) == {"processes": 1, "step": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processes": 0}, "processes is 0, expected a whole number from 1 on"),
        ({"step": "x"}, "step is 'x', expected a whole number"),
        ({"images_seen": -1}, "images_seen is -1"),
        ({"loss_sums": {"loss": None}}, "loss_sums.loss is None, expected a number"),
        ({"place": {"epoch": 0}}, "place has no 'images'"),
        ({"best": {}}, "best has no 'metric'"),
    ],
)
def test_positions_that_cannot_be_are_refused(change: dict, message: str):
    with pytest.raises(UserError, match=rf"^step\.json: {message}.*get the file again"):
        checked_position(GOOD | change, Path("step.json"))


def test_the_random_state_of_a_device_is_looked_for(monkeypatch):
    device = torch.device("cuda", 1)
    states = [torch.tensor([number], dtype=torch.uint8) for number in range(3)]
    monkeypatch.setattr(
        torch, "get_device_module", lambda one: SimpleNamespace(get_rng_state=lambda asked: states[asked.index])
    )
    assert has_random_state(device, {"torch_cuda_manual_seed": states})
    assert not has_random_state(device, {"torch_cuda_manual_seed": [states[0]]})
    assert not has_random_state(device, {"torch_manual_seed": states[1]}), "saved on the CPU"
    assert has_random_state(torch.device("cpu"), {})

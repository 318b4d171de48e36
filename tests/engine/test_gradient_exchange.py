"""A process that fails in the backward pass does its part of the exchange of gradients."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from e2e_vl.run.agreement import Agreement
from e2e_vl.run.gradient_exchange import GradientExchange
from e2e_vl.run.step_memory import MemoryGuard, StepUndoneError
from tests.end_of_memory import EndOfMemory

LAYERS = 4
EARLIER_STEPS = [0, 1, 3]  # DistributedDataParallel makes other buckets in its second step


class Layers(nn.Module):
    """Layers in a row, and one that no loss needs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(LAYERS)])
        self.unused = nn.Linear(2, 2)
        self.ends_behind: int | None = None  # layer to whose output no gradient comes; -1: to the input of all

    def forward(self, value):
        for number, layer in enumerate(self.layers, start=-1):
            value = layer(EndOfMemory.apply(value) if self.ends_behind == number else value)
        return (EndOfMemory.apply(value) if self.ends_behind == LAYERS - 1 else value).square().sum()


def prepared(*, exchanges: bool = True) -> tuple[DistributedDataParallel, GradientExchange | None]:
    # a bucket for each tensor
    model = DistributedDataParallel(Layers(), find_unused_parameters=True, bucket_cap_mb=1e-6)
    return model, GradientExchange(model) if exchanges else None


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if one.grad is None else one.grad.flatten().tolist() for one in model.parameters()]


def steps(rank: int) -> list:
    """Gradients of some steps with the exchange, and without it."""
    found = []
    for exchanges in (True, False):
        model, exchange = prepared(exchanges=exchanges)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            if exchange is not None:
                exchange.begin()
            model(inputs(rank, step)).backward()
        found.append(gradients(model))
    return found


def fail(rank: int, accelerator: SimpleNamespace, agreement: Agreement, earlier: int, behind: int) -> list:
    """In one process memory ends after some steps; what every process hears of it, and buckets begun before."""
    model, exchange = prepared()
    guard = MemoryGuard(accelerator, agreement, model)
    for step in range(earlier + 1):
        model.zero_grad(set_to_none=True)
        if step == earlier and rank == 1:
            model.module.ends_behind = behind
        loss = model(inputs(rank, step))
        with guard:
            exchange.begin()
            loss.backward()
        begun = exchange._buckets
        if guard.error is not None:
            exchange.finish()
        try:
            guard.agree()
        except StepUndoneError as undone:
            # what comes next in the same group is not mixed up with what was left
            everybody = torch.full((2,), rank + 1.0)
            distributed.all_reduce(everybody)
            return [step, type(undone.error).__name__, begun, everybody.tolist()]
    return ["nothing happened"]


def work(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'm'}", rank=rank, world_size=2)
    accelerator = SimpleNamespace(process_index=rank, num_processes=2)
    agreement = Agreement(accelerator, 1.0)
    cases = [(earlier, behind) for earlier in EARLIER_STEPS for behind in range(-1, LAYERS)]
    found = {
        "steps": steps(rank),
        "failed": [[*case, fail(rank, accelerator, agreement, *case)] for case in cases],
    }
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.start_processes(work, args=(folder,), nprocs=2, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_gradients_are_the_same_as_without_it(found):
    for one in found:
        with_exchange, without = one["steps"]
        assert with_exchange == without
        assert all(any(values) for values in with_exchange[: 2 * LAYERS])
    assert found[0]["steps"] == found[1]["steps"]


def test_wherever_one_fails_both_get_through_and_hear_of_it(found):
    for (earlier, behind, first), (_, _, second) in zip(*(one["failed"] for one in found), strict=True):
        assert first == [earlier, "NoneType", 2 * LAYERS + 2, [3.0, 3.0]], (earlier, behind)
        assert second[:2] == [earlier, "OutOfMemoryError"] and second[3] == [3.0, 3.0], (earlier, behind)
        assert second[2] <= 2 * (LAYERS - 1 - behind) + 2, (earlier, behind)
    begun = {second[2] for _, _, second in found[1]["failed"]}
    assert {0, 2 * LAYERS} <= begun and len(begun) >= LAYERS  # before all buckets, between them, and behind the last


def test_without_other_processes_there_is_nothing_to_do():
    exchange = GradientExchange(nn.Linear(1, 1))
    exchange.begin()
    exchange.finish()
    assert exchange._unfinished == []

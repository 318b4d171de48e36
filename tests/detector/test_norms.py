"""Synchronised batch norm between CPU processes: two halves of a batch give what the whole batch gives."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from detector.resnet import SyncBatchNorm

CHANNELS = 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, CHANNELS, 4, 4, generator=generator) * 3 + 1, torch.randn(6, 3, 4, 4, generator=generator)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    inputs, weights = (part.split((2, 4))[rank] for part in data())  # shares of different size
    inputs = inputs.clone().requires_grad_()
    norm = SyncBatchNorm(CHANNELS)
    out = norm(inputs)
    (out * weights).sum().backward()
    torch.distributed.all_reduce(norm.weight.grad)
    result = (out.detach(), inputs.grad, norm.weight.grad, norm.running_mean, norm.running_var)
    torch.save(result, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path):
    torch.multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))

    inputs, weights = data()
    inputs.requires_grad_()
    norm = nn.BatchNorm2d(CHANNELS)
    out = norm(inputs)
    (out * weights).sum().backward()
    torch.testing.assert_close(torch.cat((first[0], second[0])), out.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat((first[1], second[1])), inputs.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first[2], norm.weight.grad, atol=1e-4, rtol=1e-4)
    for part in (first, second):
        torch.testing.assert_close(part[3], norm.running_mean)
        torch.testing.assert_close(part[4], norm.running_var)


def test_one_process_is_plain_batch_norm():
    inputs, _ = data()
    torch.testing.assert_close(SyncBatchNorm(CHANNELS)(inputs), nn.BatchNorm2d(CHANNELS)(inputs))

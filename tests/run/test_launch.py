"""The `Accelerator` of a command; test_two_processes.py launches real processes."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path

import pytest
import torch

from e2e_vl.run.launch import NUMBERS_OF_PROCESSES, gather_to_main, make_accelerator, on_main


@pytest.fixture
def launched(monkeypatch):
    """What `accelerate launch` tells a process on a machine with four cores."""
    for name in (*NUMBERS_OF_PROCESSES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr("os.cpu_count", lambda: 4)


@pytest.mark.usefixtures("on_cpu")
def test_the_accelerator_is_on_the_cpu_where_the_environment_says_so():
    accelerator = make_accelerator("no")
    assert (accelerator.device.type, accelerator.num_processes) == ("cpu", 1)


@pytest.mark.usefixtures("on_cpu", "launched")
@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
@pytest.mark.parametrize(("processes", "threads"), [("1", 4), ("2", 2), ("8", 1)])
def test_processes_of_accelerate_share_all_cores(monkeypatch, name, processes, threads):
    monkeypatch.setenv(name, processes)
    torch.set_num_threads(1)  # what `accelerate launch` leaves
    make_accelerator("no")
    assert torch.get_num_threads() == threads


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(number)`: torch finds so many."""
    for name in (*NUMBERS_OF_PROCESSES, "MASTER_ADDR", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda number: monkeypatch.setattr("torch.accelerator.device_count", lambda: number)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("number", "environment", "message"),
    [
        (0, {"CUDA_VISIBLE_DEVICES": "0"}, "asks for the GPUs 0, but torch finds no GPUs among them"),
        (1, {"CUDA_VISIBLE_DEVICES": "0,7"}, "asks for the GPUs 0,7, but torch finds 1 GPU among them"),
        (2, {"LOCAL_WORLD_SIZE": "3"}, "3 processes were asked for, .* but torch finds 2 GPUs on this machine"),
        (0, {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}, "2 processes .* torch finds no GPUs"),
    ],
)
def test_gpus_that_do_not_exist_are_refused(monkeypatch, gpus, number, environment, message):
    gpus(number)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{message}.* use the CPU"):
        make_accelerator("no")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert make_accelerator("no").device.type == "cpu"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "environment",
    [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}],
)
def test_who_asks_for_no_gpu_gets_the_cpu(monkeypatch, gpus, environment):
    gpus(0)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert make_accelerator("no").device.type == "cpu"


@pytest.mark.usefixtures("on_cpu", "launched")
@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE"])
def test_an_address_is_no_reason_to_refuse_where_the_number_of_processes_is_known(monkeypatch, name):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="starts only one"):
        make_accelerator("no")
    monkeypatch.setenv(name, "1")
    assert make_accelerator("no").num_processes == 1


@pytest.mark.usefixtures("on_cpu", "launched")
@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_divided_models_are_refused(monkeypatch, variable, name):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=rf"^{name} was asked for .*every process has the whole model") as caught:
        make_accelerator("no")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("on_cpu", "launched")
def test_accumulation_is_what_the_settings_say(monkeypatch, caplog):
    """From the environment it would divide every loss."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = make_accelerator("no")
    assert accelerator.gradient_accumulation_steps == 1
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4, which is ignored; train.accumulate says" in caplog.text
    weight = torch.ones((), requires_grad=True)
    accelerator.backward(3 * weight)
    assert weight.grad == 3


def meet(rank: int, number: int, folder: Path) -> None:
    """What one of several forked processes sees, as a JSON file."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=number
    )
    one = types.SimpleNamespace(num_processes=number, is_main_process=rank == 0)
    gathered = gather_to_main(one, [{"rank": rank}] * (rank + 1))
    facts = [gathered, on_main(one, lambda: {"number": len(gathered)} if rank == 0 else pytest.fail("only on main"))]
    (folder / f"{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_predictions_are_gathered_to_the_main_process_and_scores_are_told_to_all(tmp_path: Path):
    torch.multiprocessing.start_processes(meet, args=(3, tmp_path), nprocs=3, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]
    all_of_them = [{"rank": rank} for rank in (0, 1, 1, 2, 2, 2)]
    assert [one[0] for one in found] == [all_of_them, [], []]
    assert [one[1] for one in found] == [{"number": 6}] * 3


def test_one_process_needs_no_group():
    alone = types.SimpleNamespace(num_processes=1, is_main_process=True)
    own = [1, 2]
    assert gather_to_main(alone, own) is own
    assert on_main(alone, lambda: 5) == 5

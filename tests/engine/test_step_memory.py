"""Where memory ends within a step, the run saves the step before it, and goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from detector.resnet import SyncBatchNorm
from e2e_vl import model as models
from e2e_vl.cli import train as tool
from e2e_vl.data.batching import ExampleDataset
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run import step_memory
from e2e_vl.run import train as training
from e2e_vl.run.agreement import Agreement
from e2e_vl.run.step_memory import MemoryGuard, StepStart, StepUndoneError
from tests.campaign.disturbed import CONFIG, SETTINGS, STEPS, differences, run_disturbed, train_disturbed
from tests.end_of_memory import CUDA, EndOfMemory

ROIS = "detector.loss_weight=1"  # sampled RoIs draw random numbers, too
# checkpoints of the last step only, and two micro-batches in each step
WORDS = [*SETTINGS, ROIS, "train.save_every_epochs=0", "train.accumulate=2", "train.images_per_batch=4"]
SENTENCE = "out of memory on cpu"
ERRORS = [torch.OutOfMemoryError(CUDA), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


def end_forward(error: BaseException, call: int = 1) -> None:
    """In a later call of the model there is no memory, after it has drawn numbers and changed batch statistics."""
    forward, calls = VisionLanguageModel.forward, 0

    def ending(self, batch):
        nonlocal calls
        output, calls = forward(self, batch), calls + 1
        if calls == call:
            random.random(), np.random.random()
            raise error
        return output

    VisionLanguageModel.forward = ending


def end_backward() -> None:
    """In the next backward pass there is no memory."""
    forward = VisionLanguageModel.forward

    def ending(self, batch):
        output = forward(self, batch)
        for loss in output.task_losses.values():
            object.__setattr__(loss, "total", EndOfMemory.apply(loss.total))
        return output

    VisionLanguageModel.forward = ending


def spoil_batch() -> None:
    """From here on examples meet a mistake of their data set."""

    def spoiled(self, request):
        raise KeyError("no such field")

    ExampleDataset.__getitem__ = spoiled


@pytest.fixture(scope="module")
def words(tiny_words) -> list[str]:
    return [*tiny_words, *WORDS]


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory):
    """Run directory of a training in so many processes that nothing happens to."""

    @functools.cache
    def run(processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"undisturbed_{processes}")
        ended = train_disturbed([*words, f"output={folder / 'run'}"], folder, processes=processes)
        assert ended.statuses == [0] * processes, ended.texts
        return folder / "run"

    return run


def fail(words: list[str], folder: Path, disturb, *, step: int, processes: int = 1, victim: int = 0):
    """Train until `disturb`, called before a step of one process, ends all."""
    command = functools.partial(tool.main, ["--config", str(CONFIG), *words, f"output={folder / 'run'}"])
    moments = [(training._Training, "_update")]
    return run_disturbed(command, moments, folder, processes=processes, victim=victim, moment=step, disturb=disturb)


def go_on(words: list[str], folder: Path, undisturbed: Path, processes: int) -> None:
    again = train_disturbed([*words, f"output={folder / 'run'}", "--resume"], folder, processes=processes)
    assert again.statuses == [0] * processes, again.texts
    assert differences(folder / "run", undisturbed) == []


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("checkpoints/*"))


ENDS = {
    "forward, on a device": functools.partial(end_forward, ERRORS[0]),
    "forward, in Python": functools.partial(end_forward, ERRORS[1]),
    "forward, on the host, second micro-batch": functools.partial(end_forward, ERRORS[2], 2),
    "backward": end_backward,
}


@pytest.mark.parametrize("place", ENDS)
def test_one_process_saves_the_step_before(words, undisturbed, tmp_path, place):
    ended = fail(words, tmp_path, ENDS[place], step=4)
    assert ended.statuses == [2] and SENTENCE in ended.texts[0] and "Traceback" not in ended.texts[0], ended.texts
    assert saved(tmp_path) == ["step_00000003"]
    go_on(words, tmp_path, undisturbed(1), 1)


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        ("forward, on a device", 0),
        ("forward, on the host, second micro-batch", 1),
        ("backward", 1),  # of the first of two micro-batches
    ],
)
def test_of_two_processes_both_save_and_one_says_why(words, undisturbed, tmp_path, place, victim):
    ended = fail(words, tmp_path, ENDS[place], step=4, processes=2, victim=victim)
    assert ended.statuses == [2, 2], ended.texts
    assert SENTENCE in ended.texts[victim] and SENTENCE not in ended.texts[1 - victim], ended.texts
    assert not any(word in text for text in ended.texts for word in ("Traceback", "lost the others")), ended.texts
    assert saved(tmp_path) == ["step_00000003"]
    go_on(words, tmp_path, undisturbed(2), 2)


def deep_in_backward() -> None:
    """In the next backward pass there is no memory once it comes to the regions' features."""
    gather = models.gather_regions

    def ending(regions, *arguments, **options):
        features = [EndOfMemory.apply(one) for one in regions.features]
        return gather(dataclasses.replace(regions, features=features), *arguments, **options)

    models.gather_regions = ending


LAST = ["train.accumulate=1", "train.images_per_batch=2"]  # a step of one micro-batch, whose backward pass is the last


@pytest.fixture(scope="module")
def undisturbed_pair(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed_pair")
    ended = train_disturbed([*words, *LAST, f"output={folder / 'run'}"], folder, processes=2)
    assert ended.statuses == [0, 0], ended.texts
    return folder / "run"


@pytest.mark.parametrize(("end", "victim"), [(end_backward, 1), (deep_in_backward, 0)])
def test_in_the_last_backward_pass_who_fails_still_does_its_part(words, undisturbed_pair, tmp_path, end, victim):
    """The other process waits for its gradients there."""
    words = [*words, *LAST]
    ended = fail(words, tmp_path, end, step=4, processes=2, victim=victim)
    assert ended.statuses == [2, 2], ended.texts
    assert SENTENCE in ended.texts[victim] and SENTENCE not in ended.texts[1 - victim], ended.texts
    assert not any(word in text for text in ended.texts for word in ("Traceback", "lost the others")), ended.texts
    assert saved(tmp_path) == ["step_00000003"]
    go_on(words, tmp_path, undisturbed_pair, 2)


def test_the_first_step_has_nothing_to_save(words, tmp_path):
    ended = fail(words, tmp_path, ENDS["forward, in Python"], step=1)
    assert ended.statuses == [2] and SENTENCE in ended.texts[0] and not saved(tmp_path), ended.texts


def test_a_mistake_of_a_data_set_loses_no_step(words, undisturbed, tmp_path):
    """It keeps its traceback."""
    ended = fail(words, tmp_path, spoil_batch, step=4)
    assert ended.statuses == [1] and "KeyError: 'no such field'" in ended.texts[0], ended.texts
    assert saved(tmp_path) == ["step_00000004"] and STEPS > 4
    shutil.rmtree(tmp_path / "again", ignore_errors=True)
    go_on(words, tmp_path, undisturbed(1), 1)


def test_what_a_step_changes_is_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    start = StepStart(model, torch.device("cpu"))
    model(torch.randn(4, 3))  # an earlier step
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start.take()

    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(1))]

    first = drawn()
    model(torch.randn(4, 3))
    assert int(model[0].num_batches_tracked) == 2
    start.put_back()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert drawn() == first


def stands_alone() -> tuple[SimpleNamespace, Agreement]:
    accelerator = SimpleNamespace(process_index=0, num_processes=1)
    return accelerator, Agreement(accelerator, 1.0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_guard_catches_only_that_memory_ends(error):
    guard = MemoryGuard(*stands_alone(), nn.Linear(1, 1))
    guard.agree()
    for other in (RuntimeError("shapes differ"), KeyError("a"), KeyboardInterrupt()):
        with pytest.raises(type(other)), guard:
            raise other
    with guard:
        held = torch.zeros(1)
        raise error
    assert guard.error is error and error.__traceback__ is None and held is not None
    with pytest.raises(StepUndoneError) as caught:
        guard.agree()
    assert caught.value.error is error and guard.error is None


def test_where_processes_meet_within_the_forward_pass_nothing_is_caught():
    accelerator, agreement = stands_alone()
    accelerator.num_processes = 2
    guard = MemoryGuard(accelerator, agreement, nn.Sequential(SyncBatchNorm(2)))
    with pytest.raises(MemoryError), guard:
        raise MemoryError
    guard.agree()  # asks nobody


def wait_in_vain(rank: int, folder: Path) -> None:
    """The first process fails, and the second one does not come so far."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'm'}", rank=rank, world_size=2)
    accelerator = SimpleNamespace(process_index=rank, num_processes=2)
    agreement = Agreement(accelerator, 1.0)
    if rank:
        while not (folder / "told").is_file():
            time.sleep(0.05)
        return
    step_memory.PATIENCE = 0.5
    guard = MemoryGuard(accelerator, agreement, nn.Linear(1, 1))
    with guard:
        raise MemoryError("it is used up")
    try:
        guard.agree()
    except MemoryError as error:
        (folder / "told").write_text(str(error), encoding="utf-8")


def test_who_failed_does_not_wait_for_ever(tmp_path):
    torch.multiprocessing.start_processes(wait_in_vain, args=(tmp_path,), nprocs=2, start_method="fork")
    assert (tmp_path / "told").read_text(encoding="utf-8") == "it is used up"

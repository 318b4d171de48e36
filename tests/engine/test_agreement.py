"""Where one of two processes cannot get its next batch, both save their last step, and one of them says why."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from detector.errors import UserError
from e2e_vl.cli import train as tool
from e2e_vl.data import batching as batches
from e2e_vl.run import train as training
from e2e_vl.run.agreement import Agreement
from e2e_vl.run.best import BestModel
from e2e_vl.tasks.refcoco import ReferringTask
from tests.campaign.disturbed import CONFIG, SETTINGS, differences, run_disturbed, train_disturbed

START, STEP, EVALUATION = ((training._Training, name) for name in ("_begin", "_update", "_evaluate"))


@pytest.fixture(scope="module")
def words(tiny_words) -> list[str]:
    return [*tiny_words, *SETTINGS]


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = train_disturbed([*words, f"output={folder / 'run'}"], folder, processes=2)
    assert ended.statuses == [0, 0], ended.texts
    return folder / "run"


def refuse_images() -> None:
    """From here on no image can be read in this process, which a test has forked."""

    def refuse(self, requests):
        raise UserError("image 7 is damaged; get it again.")

    batches._Batches.__getitems__ = refuse


def kill_workers_later() -> None:
    """While the next batch is evaluated."""
    predict = ReferringTask.predict

    def dying(*arguments):
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        return predict(*arguments)

    ReferringTask.predict = dying


def fail(words: list[str], moments: list, folder: Path, disturb, *, victim: int, moment: int, sentence: str) -> str:
    """Train until one process fails; the name of the newest checkpoint then."""
    command = functools.partial(tool.main, ["--config", str(CONFIG), *words, f"output={folder / 'run'}"])
    ended = run_disturbed(command, moments, folder, processes=2, victim=victim, moment=moment, disturb=disturb)
    assert ended.statuses == [2, 2], ended.texts
    assert sentence in ended.texts[victim] and sentence not in ended.texts[1 - victim], ended.texts
    assert not any(word in text for text in ended.texts for word in ("Traceback", "lost the others")), ended.texts
    return max((path.name for path in (folder / "run").glob("checkpoints/*")), default="")


def test_all_save_before_one_gives_up(words, undisturbed, tmp_path):
    """In a step between two checkpoints; the run that goes on ends as the undisturbed one."""
    options = {"victim": 1, "moment": 1, "sentence": "image 7 is damaged; get it again."}
    assert fail(words, [STEP], tmp_path, refuse_images, **options) == "step_00000001"
    again = train_disturbed([*words, f"output={tmp_path / 'run'}", "--resume"], tmp_path, processes=2)
    assert again.statuses == [0, 0], again.texts
    assert differences(tmp_path / "run", undisturbed) == []


def test_a_dead_worker_of_one_process_loses_nothing(words, tmp_path):
    """In the evaluation after step 3, which has no checkpoint of its own."""
    more = ["data.workers=1", "train.max_steps=4"]
    options = {"victim": 0, "moment": 1, "sentence": "a data worker died"}
    assert fail([*words, *more], [EVALUATION], tmp_path, kill_workers_later, **options) == "step_00000003"


def spoil_predictions() -> None:
    """In the next evaluation the task has a mistake."""
    ReferringTask.predict = lambda *arguments: {}["no such key"]


def spoil_metrics() -> None:
    ReferringTask.metrics = lambda *arguments: {}["no such key"]


def fill_disk() -> None:
    """The model of this evaluation cannot be written as the best one."""

    def full(self, save):
        raise OSError(errno.ENOSPC, "No space left on device")

    BestModel.write = full


@pytest.mark.parametrize("disturb", [spoil_predictions, spoil_metrics])
def test_a_mistake_in_an_evaluation_loses_no_step(words, undisturbed, tmp_path, disturb):
    """In the evaluation after step 3, which has no checkpoint of its own; the mistake keeps its traceback."""
    command = functools.partial(tool.main, ["--config", str(CONFIG), *words, f"output={tmp_path / 'run'}"])
    ended = run_disturbed(command, [EVALUATION], tmp_path, processes=2, victim=0, moment=1, disturb=disturb)
    assert ended.statuses == [1, 2] and "KeyError: 'no such key'" in ended.texts[0], ended.texts
    assert "Traceback" not in ended.texts[1] and "lost the others" not in ended.texts[1], ended.texts
    assert max(path.name for path in (tmp_path / "run").glob("checkpoints/*")) == "step_00000003"
    again = train_disturbed([*words, f"output={tmp_path / 'run'}", "--resume"], tmp_path, processes=2)
    assert again.statuses == [0, 0], again.texts
    assert differences(tmp_path / "run", undisturbed) == []


def test_a_best_model_that_cannot_be_written_is_judged_again(words, undisturbed, tmp_path):
    options = {"victim": 0, "moment": 1, "sentence": "the disk or a quota is full"}
    assert fail(words, [EVALUATION], tmp_path, fill_disk, **options) == "step_00000003"
    again = train_disturbed([*words, f"output={tmp_path / 'run'}", "--resume"], tmp_path, processes=2)
    assert again.statuses == [0, 0], again.texts
    assert differences(tmp_path / "run", undisturbed) == []


def test_a_fault_before_the_first_step_ends_all(words, tmp_path):
    options = {"victim": 1, "moment": 1, "sentence": "image 7 is damaged; get it again."}
    assert fail(words, [START], tmp_path, refuse_images, **options) == ""


def stand(rank: int, number: int, folder: Path) -> None:
    """What one of several processes hears, as a JSON file."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'm'}", rank=rank, world_size=number)
    agreement = Agreement(SimpleNamespace(process_index=rank, num_processes=number), 1.0)
    heard = [
        agreement.reach(failed=False, signal=None),
        agreement.reach(failed=rank > 0, signal=None),
        agreement.reach(failed=False, signal=15 if rank == 1 else None),
        agreement.reach(failed=rank == 2, signal=2 if rank == 0 else None),
    ]
    (folder / f"{rank}.json").write_text(json.dumps(heard), encoding="utf-8")
    torch.distributed.destroy_process_group()


def test_every_process_hears_of_the_first_that_failed_and_of_signals(tmp_path):
    torch.multiprocessing.start_processes(stand, args=(3, tmp_path), nprocs=3, start_method="fork")
    for rank in range(3):
        heard = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert heard == [[None, None], [1, None], [None, 15], [2, 2]]

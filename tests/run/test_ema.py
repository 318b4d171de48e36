"""The moving average of the weights: what it is, who uses it, and that a resumed run has the same one.

For two processes see test_launch.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from detector.errors import UserError
from detector.io import read_json
from e2e_vl.config_files import load_config
from e2e_vl.io import CHECKSUMS, POSITION_FILE
from e2e_vl.run import train as training
from e2e_vl.run.checkpoint import AVERAGE_FILE, RAW_WEIGHTS_FILE, load_average, load_model
from e2e_vl.run.ema import WeightAverage
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.conftest import cpu_with_one_thread
from tests.run.runs import ROOT, assert_same_run, logged, lose_newest, predictions_of
from tests.same import assert_same

# Dropout, flips, batch statistics and accumulated micro-batches; each of the five steps is saved,
# and the second and the fourth are evaluated. Three steps are an epoch.
SETTINGS = (
    "data={texts_per_image: null, flip: 0.5, boxes: {train: gt}}",
    "encoder.config.hidden_dropout_prob=0.1",
    "detector.loss_weight=0",
    "detector.overrides.MODEL.RESNETS.NORM=BN",
    "train={max_steps: 5, save_every_epochs: 0.3333333, save_total_limit: 5, gradient_accumulation_steps: 2}",
    "train={trackers: [], metric_for_best_model: val/loss_gt_boxes}",
    "eval={every_epochs: 0.6666667, boxes: [gt], report_pictures: 0}",
)
DECAY = "train.ema_decay=0.9"

pytestmark = pytest.mark.usefixtures("on_cpu")


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for part in ("detector", "encoder", "task"):
        for name, value in load_file(model / part / "model.safetensors").items():
            weights[f"{part}.{name}"] = value
    return weights


def raw_weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights that are trained: in a file of their own if the model's are averaged."""
    path = checkpoint / RAW_WEIGHTS_FILE
    if not path.exists():
        return weights_of(checkpoint / "model")
    weights = load_file(path)
    return {name.removeprefix("model."): value for name, value in weights.items()}


def average_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights in the model of a checkpoint that differ from the raw ones."""
    average = weights_of(checkpoint / "model")
    return {name: average[name] for name in changed_names(average, raw_weights_of(checkpoint))}


def updates_of(checkpoint: Path) -> int:
    return read_json(checkpoint / POSITION_FILE)["averaged_updates"]


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def changed_names(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> set[str]:
    assert set(weights) == set(others)
    return {name for name, value in weights.items() if not torch.equal(value, others[name])}


# The average


@pytest.fixture
def model() -> nn.Module:
    frozen = nn.Linear(3, 2).requires_grad_(False)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), frozen)


def test_three_steps_by_hand(model):
    """The decay is 1 / 10, 2 / 11, and then no more than 0.2, although 3 / 12 is."""
    average = WeightAverage(model, 0.2)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name: weight.double().numpy() for name, weight in weights.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for decay in (1 / 10, 2 / 11, 0.2):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        for name, weight in weights.items():
            expected[name] = decay * expected[name] + (1 - decay) * weight.double().numpy()
    for name, value in expected.items():
        np.testing.assert_allclose(average.averages[name].numpy(), value, rtol=1e-5, atol=1e-7)
    assert set(average.averages) == {"0.weight", "0.bias", "1.weight", "1.bias"}, "what is frozen is left out"


def test_the_raw_weights_come_back_bit_for_bit(model):
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        model[0].weight.add_(torch.randn(3, 2))
    average.update()
    raw = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in average.averages.items()}
    with pytest.raises(KeyboardInterrupt), average.applied():
        assert torch.equal(model[0].weight, averages["0.weight"])
        assert not torch.equal(model[0].weight, raw["0.weight"])
        raise KeyboardInterrupt
    assert changed_names(model.state_dict(), raw) == set()
    assert changed_names(average.averages, averages) == set()


def test_without_the_setting_nothing_is_copied(model):
    average = WeightAverage(model, None)
    average.update()
    assert average.averages == {}


@pytest.mark.parametrize("decay", ["0", "1"])
def test_a_decay_lies_between_0_and_1(tiny_config, decay):
    with pytest.raises(UserError, match=r"ema_decay"):
        tiny_config(f"train.ema_decay={decay}")


# Runs


@pytest.fixture(scope="module")
def runs(tiny_words, tmp_path_factory) -> dict[str, Path]:
    """Run directories: with the average, without it, and each of them resumed with it after its fourth step."""
    folder = tmp_path_factory.mktemp("averages")
    runs = {name: folder / name for name in ("averaged", "plain", "resumed", "begun_late")}

    def train_into(name: str, *words: str, resume: bool = False) -> None:
        own_words = [*tiny_words, *SETTINGS, *words, f"output={runs[name]}"]
        with cpu_with_one_thread():
            train(load_config(ROOT / "configs/tiny/refcoco.yaml", own_words), resume=resume)

    train_into("averaged", DECAY)
    train_into("plain")
    lose_newest(runs["averaged"], runs["resumed"])
    train_into("resumed", DECAY, resume=True)
    lose_newest(runs["plain"], runs["begun_late"])
    train_into("begun_late", DECAY, resume=True)
    return runs


def test_training_does_not_use_the_average(runs):
    assert logged(runs["averaged"]) == logged(runs["plain"])
    for step in range(1, 6):
        averaged, plain = (checkpoint_of(runs[name], step) for name in ("averaged", "plain"))
        assert changed_names(raw_weights_of(averaged), raw_weights_of(plain)) == set()
        assert (averaged / RAW_WEIGHTS_FILE).exists()
        assert not (plain / RAW_WEIGHTS_FILE).exists() and updates_of(plain) == 0


def test_the_average_of_a_run_by_hand(runs):
    checkpoints = [checkpoint_of(runs["averaged"], step) for step in (2, 3, 4, 5)]
    expected, *averages = (weights_of(checkpoint / "model") for checkpoint in checkpoints)
    for checkpoint, average, decay in zip(checkpoints[1:], averages, (3 / 12, 4 / 13, 5 / 14), strict=True):
        weights = raw_weights_of(checkpoint)
        for name in average_of(checkpoint):
            expected[name] = decay * expected[name] + (1 - decay) * weights[name]
            torch.testing.assert_close(average[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert [updates_of(checkpoint) for checkpoint in checkpoints] == [2, 3, 4, 5]


def test_models_have_the_average(runs):
    """Of trained parameters; what is frozen and batch statistics are as they were."""
    checkpoint = checkpoint_of(runs["averaged"], 5)
    weights = weights_of(runs["averaged"] / "model")
    changed = average_of(checkpoint)
    assert changed and not [name for name in changed if "running_" in name or name.startswith("detector.rpn.")]
    assert changed_names(weights, weights_of(checkpoint / "model")) == set()
    best = read_json(runs["averaged"] / "best" / "best.json")["step"]
    best_model = checkpoint_of(runs["averaged"], best) / "model"
    assert changed_names(weights_of(runs["averaged"] / "best"), weights_of(best_model)) == set()
    assert RAW_WEIGHTS_FILE in read_json(checkpoint / CHECKSUMS)


def test_evaluations_use_the_average(runs, tmp_path):
    _, path = evaluate_run(runs["averaged"], split="val", boxes="gt", output=tmp_path / "again.json")
    assert_same(read_json(path), predictions_of(runs["averaged"]))
    losses = [[line["val/loss_gt_boxes"] for line in logged(runs[name], "eval")] for name in ("averaged", "plain")]
    assert all(averaged != plain for averaged, plain in zip(*losses, strict=True))


def test_a_resumed_run_is_the_same_bit_for_bit(runs):
    assert_same_run(runs["averaged"], runs["resumed"])
    checkpoints = [checkpoint_of(runs[name], 5) for name in ("averaged", "resumed")]
    assert changed_names(*(raw_weights_of(checkpoint) for checkpoint in checkpoints)) == set()
    assert changed_names(*(weights_of(checkpoint / "model") for checkpoint in checkpoints)) == set()
    assert [updates_of(checkpoint) for checkpoint in checkpoints] == [5, 5]


def test_an_average_in_a_file_of_before_is_resumed(runs, tmp_path):
    """Of checkpoints that had it there, and in model/ too."""
    checkpoint = tmp_path / "step_00000005"
    shutil.copytree(checkpoint_of(runs["averaged"], 5), checkpoint)
    _, model, _ = load_model(checkpoint)
    average = WeightAverage(model, 0.9)
    state = {name: torch.full_like(value, 0.5) for name, value in average.averages.items()}
    save_file({**state, "updates": torch.tensor(7)}, checkpoint / AVERAGE_FILE)
    load_average(average, model, checkpoint)
    assert average.updates == 7
    assert changed_names(average.averages, state) == set()


def test_in_a_checkpoint_without_it_the_average_begins_with_the_weights(runs):
    checkpoint = checkpoint_of(runs["begun_late"], 5)
    average = average_of(checkpoint)
    assert average and updates_of(checkpoint) == 1
    first, second = (raw_weights_of(checkpoint_of(runs["plain"], step)) for step in (4, 5))
    for name, value in average.items():
        torch.testing.assert_close(value, 0.1 * first[name] + 0.9 * second[name], rtol=1e-5, atol=1e-6, msg=name)


def test_steps_that_fp16_skips_are_not_averaged(tiny_config, monkeypatch):
    monkeypatch.setattr(training, "FiniteCheck", lambda scaled: lambda values, step, batches: step != 2)
    settings = "train={max_steps: 3, trackers: [], ema_decay: 0.9}"
    config = tiny_config("data.boxes.train=gt", "detector.loss_weight=0", "eval.boxes=[]", settings)
    train(config)
    assert updates_of(checkpoint_of(Path(config.output), 3)) == 2

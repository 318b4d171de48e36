"""Numbers that are NaN or infinite are never applied and never saved, and what caused them is named and kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from e2e_vl.cli import train as tool
from e2e_vl.io import read_log
from e2e_vl.run import train as training
from e2e_vl.run.failed_step import FailedStep, refuse
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]
FAST = ("data.boxes.train=gt", "detector.loss_weight=0", "eval.boxes=[]", "train.max_steps=4", "data.texts_per_image=1")

pytestmark = pytest.mark.usefixtures("on_cpu")


class Poison(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.nan


@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_a_gradient_that_is_nan_is_not_applied(tiny_config, monkeypatch, clip):
    """The loss is finite. The images of this step are named, and the run goes on from the checkpoint before."""
    config = tiny_config(*FAST, f"train.clip_norm={clip}", "train.save_every_epochs=0.01")
    run, update, before, names = Path(config.output), training._Training._update, {}, []

    def poisoned(self, micro_batches):
        if self.step == 2:
            before.update({name: value.clone() for name, value in self.built.model.state_dict().items()})
            names.extend(name for batch in micro_batches for name in batch.images.names)
            layer = self.built.model.task.head.output
            layer.register_forward_hook(lambda module, inputs, output: Poison.apply(output))
        return update(self, micro_batches)

    monkeypatch.setattr(training._Training, "_update", poisoned)
    message = (
        r"^the gradient of referring became NaN or infinite in step 3 \(images (.*)\); lower .*failed_step. --resume"
    )
    with pytest.raises(ValueError, match=message) as caught:
        train(config)
    assert all(name in str(caught.value) for name in names) and len(names) == 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]
    assert [line["step"] for line in read_log(run / "log.jsonl")] == [1, 2]
    kept = run / "failed_step"
    assert json.loads((kept / "about.json").read_text())["images"] == names
    assert "NaN" not in (kept / "about.json").read_text()
    weights = load_file(kept / "weights.safetensors")
    learned = {name for name in weights if "running" not in name and "num_batches" not in name}  # by batch norms
    assert all(torch.equal(value, before[name]) for name, value in weights.items() if name in learned)
    batches = torch.load(kept / "batches_0.pt", weights_only=True)
    assert batches["batches"][0]["images"]["names"] == names and batches["random_state"].dtype == torch.uint8
    assert torch.load(kept / "optimizer.pt", weights_only=True)["state"]
    monkeypatch.setattr(training._Training, "_update", update)
    assert train(config, resume=True)["steps"] == 4


def test_where_the_step_cannot_be_kept_the_message_says_so(tmp_path):
    """A file is in the place of the folder, as on a disk where nothing more can be written."""
    folder = tmp_path / "failed_step"
    folder.write_text("")
    batch = SimpleNamespace(images=SimpleNamespace(names=["1.jpg"]))
    failed = FailedStep(folder, 3, ["referring"], [batch], [{"referring": torch.tensor(torch.nan)}], torch.zeros(1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = SimpleNamespace(process_index=0, is_main_process=True)
    with pytest.raises(
        ValueError, match=r"weights could not be written to .*failed_step \(.*File exists.*\)\. Go on\.$"
    ):
        refuse(failed, accelerator, model, optimizer, advice="Go on.", alone=True)
    assert folder.is_file()


@pytest.mark.parametrize("boxes", ["gt", "online"])
def test_a_rate_that_ruins_the_weights_is_an_error(tiny_words, tmp_path, capfd, boxes):
    words = [*tiny_words, f"output={tmp_path / 'run'}", "train.lr=1e30", "train.warmup_steps=0", "train.max_steps=3"]
    words += [f"data.boxes.train={boxes}", "eval.boxes=[gt]"]
    words += ["detector.loss_weight=0"] if boxes == "gt" else []
    assert tool.main(["--config", str(ROOT / "configs" / "tiny" / "refcoco.yaml"), *words]) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1 and "infinite" in error[0] and "lower train.lr" in error[0]
    assert not list((tmp_path / "run").rglob("step_*"))
    text = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.json*"))
    assert "NaN" not in text and "Infinity" not in text


def test_weights_that_are_not_finite_are_not_saved(tiny_config, monkeypatch):
    """After the last step no loss would show them."""
    config = tiny_config(*FAST, "train.max_steps=2", "train.save_every_epochs=0.01")
    update = training._Training._update

    def poisoned(self, micro_batches):
        values = update(self, micro_batches)
        if self.step == 1:
            torch.nn.init.constant_(self.built.model.task.head.output.bias, torch.inf)
        return values

    monkeypatch.setattr(training._Training, "_update", poisoned)
    with pytest.raises(
        FloatingPointError, match=r"head.output.bias became NaN.*nothing is saved.*from .*step_00000001"
    ):
        train(config)
    assert [path.name for path in (Path(config.output) / "checkpoints").iterdir()] == ["step_00000001"]
    assert not (Path(config.output) / "metrics.json").exists()

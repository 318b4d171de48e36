"""What CONTRIBUTING.md promises: a new data set, task or encoder is one class and one entry in a dict of build.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from detector.structures import Loss
from e2e_vl.data.examples import Example, Request
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.encoders.base import Encoder
from e2e_vl.engine import build
from e2e_vl.engine.checkpoint import load_model
from e2e_vl.engine.train import train
from e2e_vl.structures import EncoderOutput, TaskOutput
from e2e_vl.tasks.base import Task

pytestmark = pytest.mark.usefixtures("on_cpu")


class LengthDataset(RefCOCODataset):
    """How many wordpieces has the text? Its records have nothing to do with boxes."""

    def __getitem__(self, request: Request) -> Example:
        example = super().__getitem__(request)
        for text in example.texts:
            text.targets = {"length": torch.tensor(float(len(text.input_ids))).numpy()}
            text.record = {"text_index": text.record["text_index"], "truth": len(text.input_ids)}
        return example


@dataclasses.dataclass
class LengthConfig:
    tolerance: float = 0.5


class LengthTask(Task):
    """A number per text, read from the pooled vector."""

    def __init__(self, hidden_size: int, config: LengthConfig):
        super().__init__()
        self.config = config
        self.head = torch.nn.Linear(hidden_size, 1)

    def forward(self, batch, regions, encoded) -> TaskOutput:
        logits = self.head(encoded.pooled)[:, 0]
        losses = {}
        if "length" in batch.targets:
            error = (logits - batch.targets["length"]).abs()
            losses["length"] = Loss(error.sum(), torch.tensor(float(len(error))))
        return TaskOutput(losses=losses, logits=logits)

    def predict(self, batch, output) -> list[dict]:
        answers = output.task.logits.tolist()
        return [record | {"answer": answer} for record, answer in zip(batch.records, answers, strict=True)]

    def correct(self, record) -> float:
        return float(abs(record["answer"] - record["truth"]) < self.config.tolerance)

    def metrics(self, records) -> dict[str, float]:
        return {"accuracy": sum(map(self.correct, records)) / len(records)}


class MeanConfig(PreTrainedConfig):
    model_type = "mean_of_words"

    vocab_size: int = 100
    feature_dim: int = 2048
    hidden_size: int = 8
    uses_whole_image: bool = False


class MeanEncoder(Encoder):
    """Word vectors and projected regions that never meet."""

    config_class = MeanConfig

    def __init__(self, config: MeanConfig):
        super().__init__(config)
        self.words = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.projection = torch.nn.Linear(config.feature_dim, config.hidden_size)
        self.post_init()

    def forward(self, texts, regions, output_attentions=False) -> EncoderOutput:
        words = self.words(texts.input_ids) * texts.attend[..., None]
        objects = self.projection(regions.features) * regions.attend[..., None]
        return EncoderOutput(text=words, regions=objects, pooled=words.mean(1) + objects.mean(1))


def test_new_parts_train_evaluate_report_and_load(tiny_config, monkeypatch):
    monkeypatch.setitem(build.DATASETS, "lengths", LengthDataset)
    monkeypatch.setitem(build.TASKS, "length", (LengthConfig, LengthTask))
    monkeypatch.setitem(build.ENCODERS, "mean_of_words", (MeanConfig, MeanEncoder))
    config = tiny_config("data.name=lengths", "task.name=length", "encoder.name=mean_of_words", "train.max_steps=2")
    config.task.config = {"tolerance": 1000.0}
    config.encoder.config = {"hidden_size": 12}
    config.eval.boxes = ["gt", "online"]

    metrics = train(config)

    assert metrics["val/accuracy_gt_boxes"] == metrics["val/accuracy_own_boxes"] == 1
    run = Path(config.output)
    predictions = json.loads((run / "predictions_val_gt.json").read_text())
    assert {frozenset(record) for record in predictions} == {frozenset({"text_index", "truth", "answer", "correct"})}
    assert (run / "report.html").is_file()
    assert load_model(run)[1].encoder.hidden_size == 12


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("detector.backend", "builtin"),
        ("encoder.name", "vl_bert"),
        ("task.name", "refcoco"),
        ("data.name", "refcoco"),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(tiny_config, setting, names):
    config = tiny_config(f"{setting}=nothing")
    with pytest.raises(ValueError, match=f"{setting} is 'nothing'; it must be one of .*{names}"):
        build.build_run(config)
    assert not Path(config.output).exists()

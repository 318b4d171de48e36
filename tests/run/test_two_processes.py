"""Two processes on one machine are one process with the joined batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from e2e_vl.config import load_config
from e2e_vl.io import read_log
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from tests.run.two_processes import start, wait
from tests.same import assert_same

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny" / "refcoco.yaml"
COMMON = (
    *(f"encoder.config.{name}=0" for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "encoder.config.region_dropout_prob=0",
    "train.max_steps=5",
    "train.lr=1e-3",
    "train.eps=1e-3",  # Adam would otherwise blow up the rounding of gradients near zero to whole steps
    "train.warmup_steps=1",
    "eval.boxes=[gt, online]",
    "eval.images_per_batch=2",
    "task.config={loss: binary, no_region_is_miss: true}",
)
# Samplers that take every anchor and every proposal, so that no random choice depends on the process; and box losses
# whose gradient does not jump at 0.
TAKE_ALL = (
    "detector.overrides.MODEL.RPN={BATCH_SIZE_PER_IMAGE: 4096, POSITIVE_FRACTION: 1.0, NMS_THRESH: 1.0, "
    "PRE_NMS_TOPK_TRAIN: 4096, POST_NMS_TOPK_TRAIN: 4096, SMOOTH_L1_BETA: 1.0}",
    "detector.overrides.MODEL.ROI_HEADS={BATCH_SIZE_PER_IMAGE: 4096, POSITIVE_FRACTION: 1.0}",
    "detector.overrides.MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA=1.0",
)
NORM = "detector.overrides.MODEL.RESNETS.NORM"
VARIANTS = {
    "task_only": (f"{NORM}=FrozenBN", "data.boxes.train=gt", "detector.loss_weight=0", "data.workers=1"),
    "detection_losses": (*TAKE_ALL, f"{NORM}=FrozenBN", "data.boxes.train=online", "train.accumulate=2"),
    "synchronised_norm": (f"{NORM}=SyncBN", "data.boxes.train=gt", "detector.loss_weight=0"),
}
TOLERANCE = {"task_only": 1e-6, "detection_losses": 1e-5}


@pytest.fixture(scope="module")
def runs(tiny_words, tmp_path_factory) -> dict[tuple[str, int], Path]:
    """Run directories by variant and number of processes."""
    folder = tmp_path_factory.mktemp("processes")
    paths = {(name, number): folder / f"{name}_{number}" for name in VARIANTS for number in (1, 2)}
    words = {key: [*tiny_words, *COMMON, *VARIANTS[key[0]], f"output={path}"] for key, path in paths.items()}

    process = start([(CONFIG, words[name, 2]) for name in VARIANTS], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in VARIANTS:
            train(load_config(CONFIG, words[name, 1]))
        AcceleratorState._reset_state(reset_partial_state=True)
    wait(process)
    return paths


def json_of(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", TOLERANCE)
def test_the_parameters_are_those_of_one_process(runs, variant):
    for part in ("detector", "encoder", "task"):
        one, two = (load_file(runs[variant, number] / "model" / part / "model.safetensors") for number in (1, 2))
        assert set(one) == set(two)
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=TOLERANCE[variant], msg=name)
    metrics = [json_of(runs[variant, number] / "metrics.json") for number in (1, 2)]
    assert [values["processes"] for values in metrics] == [1, 2]
    lines = [read_log(runs[variant, number] / "log.jsonl")[:5] for number in (1, 2)]
    for one, two in zip(*lines, strict=True):
        assert set(one) == set(two)
        for name in set(one) - {"kind"}:
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-6), name


def test_batch_statistics_are_those_of_both_processes(runs):
    """Up to the first update; later, rounding flips ReLUs of flat image areas, which batch statistics make large."""
    lines = [read_log(runs["synchronised_norm", number] / "log.jsonl")[:2] for number in (1, 2)]
    for one, two in zip(*lines, strict=True):
        assert one["referring"] == pytest.approx(two["referring"], rel=2e-6)
    assert lines[0][0]["lr_head"] == 0 < lines[0][1]["lr_head"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("boxes", ["gt", "online"])
def test_every_text_is_predicted_once(runs, variant, boxes):
    one, two = (json_of(runs[variant, number] / f"predictions_val_{boxes}.json") for number in (1, 2))
    indices = [record["text_index"] for record in two]
    assert indices == list(range(len(indices)))
    assert indices == [record["text_index"] for record in one]
    assert json_of(runs[variant, 2] / "metrics.json")[f"val/count_{'own' if boxes == 'online' else 'gt'}_boxes"] == len(
        two
    )


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("boxes", ["gt", "online"])
def test_evaluation_does_not_depend_on_the_number_of_processes(runs, boxes, tmp_path):
    """The same weights, evaluated by two processes at the end of their training and by one now."""
    run = runs["detection_losses", 2]
    metrics, path = evaluate_run(run, split="val", boxes=boxes, output=tmp_path / "one.json")
    assert_same(json_of(path), json_of(run / f"predictions_val_{boxes}.json"))
    by_two = json_of(run / "metrics.json")
    assert_same(metrics, {name: by_two[name] for name in metrics})


def test_a_saved_run_is_evaluated_by_two_processes(runs):
    for variant in VARIANTS:
        run = runs[variant, 2]
        assert_same(json_of(run / "again.json"), json_of(run / "predictions_val_gt.json"))

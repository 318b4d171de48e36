"""VQA, VCR, and referring expressions with phrases in two processes are one process with the joined batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from e2e_vl.config import load_config
from e2e_vl.io import read_log
from e2e_vl.run.build import make_synthetic_data
from e2e_vl.run.train import train
from tests.run.two_processes import start, wait

ROOT = Path(__file__).parents[2]
COMMON = (
    "detector.overrides.MODEL.RESNETS.NORM=FrozenBN",
    "detector.loss_weight=0",
    "data.boxes.train=gt",
    "train.max_steps=3",
    "train.accumulate=2",  # micro-batches of two images, one a process
    "train.warmup_steps=1",
    "train.eps=1e-3",  # Adam would otherwise blow up the rounding of gradients near zero to whole steps
    "eval={boxes: [gt], images_per_batch: 2, every_epochs: 0, report_pictures: 0}",
)
LOSSES = {"vqa": {"vqa"}, "vcr": {"choice", "region_class"}, "phrases": {"phrases", "phrase_tags"}}
CONFIGS = {task: ROOT / "configs" / "tiny" / f"{task}.yaml" for task in ("vqa", "vcr")}
CONFIGS["phrases"] = ROOT / "configs" / "tiny" / "refcoco.yaml"
OWN = {
    "phrases": (
        "phrases={weight: 1.0, layer: 1, size: 8}",
        "data.files.phrases=refcoco+_phrases/Sentences",
        "data.files.phrase_boxes=refcoco+_phrases/Annotations",
    )
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, int], Path]:
    """Run directories by task and number of processes."""
    folder = tmp_path_factory.mktemp("tasks")
    paths = {(task, number): folder / f"{task}_{number}" for task in LOSSES for number in (1, 2)}
    words = {
        key: [
            f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
            f"data.root={folder / f'data_{key[0]}'}",
            f"output={path}",
            *COMMON,
            *OWN.get(key[0], ()),
        ]
        for key, path in paths.items()
    }
    for task, config in CONFIGS.items():
        make_synthetic_data(load_config(config, words[task, 1]))
    process = start([(config, words[task, 2]) for task, config in CONFIGS.items()], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        for task, config in CONFIGS.items():
            train(load_config(config, words[task, 1]))
        AcceleratorState._reset_state(reset_partial_state=True)
    wait(process)
    return paths


@pytest.mark.parametrize("task", LOSSES)
def test_losses_and_parameters_are_those_of_one_process(runs, task):
    lines = [read_log(runs[task, number] / "log.jsonl")[:3] for number in (1, 2)]
    for one, two in zip(*lines, strict=True):
        assert set(one) == set(two) > LOSSES[task]
        for name in LOSSES[task] | {"loss", "grad_norm"}:
            assert one[name] == pytest.approx(two[name], rel=1e-4), name
            assert one[name] > 0
    for part in ("detector", "encoder", "task", *(["phrases"] if task == "phrases" else [])):
        one, two = (load_file(runs[task, number] / "model" / part / "model.safetensors") for number in (1, 2))
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("task", LOSSES)
def test_every_question_is_predicted_once(runs, task):
    one, two = (json.loads((runs[task, number] / "predictions_val_gt.json").read_text()) for number in (1, 2))
    again = json.loads((runs[task, 2] / "again.json").read_text())  # the saved run, evaluated by two processes
    assert [record["text_index"] for record in one] == list(range(len(one)))
    for key in ("answer", "choice", "answers", "label", "conditioned_on", "box", "phrases"):
        assert [record.get(key) for record in one] == [record.get(key) for record in two], key
    assert again == two


def test_both_know_that_the_head_finds_phrases(runs):
    """The flag is a buffer, which the processes take over from the first one before every step."""
    for number in (1, 2):
        saved = load_file(runs["phrases", number] / "model" / "phrases" / "model.safetensors")
        assert saved["finds_phrases"] == 1
    one, two = (json.loads((runs["phrases", number] / "predictions_val_gt.json").read_text()) for number in (1, 2))
    again = json.loads((runs["phrases", 2] / "again.json").read_text())
    for records in (one, two, again):
        assert all(record["grounded"] for record in records)
    for records in (two, again):
        for first, second in zip(one, records, strict=True):
            for phrase, other in zip(first["grounded"], second["grounded"], strict=True):
                assert (phrase["text"], phrase["box"]) == (other["text"], other["box"])
                assert phrase["score"] == pytest.approx(other["score"], abs=2e-4)  # rounded to four places

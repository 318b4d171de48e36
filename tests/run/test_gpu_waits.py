"""How often the host waits for a GPU, and how many kernels it launches, counted on a pretended one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ENCODERS
from tests.run.runs import NARROW_BASE, ROOT, TINY_DETECTOR

PREDICTED, GIVEN = 8, 3  # of a training step with predicted boxes and detection losses, or with given boxes
PRETRAINING = 9
ASK, ASK_GIVEN = 6, 3  # of a question about predicted or given boxes, with a phrase head: its phrases are another copy
REGIONS = 6  # of one photo
EVALUATION = {"gt": 3, "detections": 3, "online": 8}  # of a batch; 1 (online 2) less for up to `CHUNK` RoIs
LAUNCHES = 1500  # operators of the forward and backward pass of the BASE model in bf16; some are several kernels
LAUNCHES_PER_IMAGE = 7  # its pixels are normalised, and its box is put in front of the others
TASKS = ("refcoco", "vqa", "gqa", "nlvr2", "flickr30k", "vcr", "pretraining")


def job(task: str, encoder: str, folder: Path) -> dict[str, Any]:
    num_val = 4 if task == "nlvr2" else 2  # a set of its pairs joins four images
    words = [
        *("train={max_steps: 2, images_per_batch: 2, warmup_steps: 0, trackers: []}", "data.workers=0"),
        *(f"data.synthetic.scenes={{train: 4, val: {num_val}}}", "data.resize={short_edge: [64], long_edge: 80}"),
        *("eval.every_epochs=0", "eval.report_pictures=0", f"data.root={folder / task}"),
        *(TINY_DETECTOR, f"output={folder / f'{task}_{encoder}'}"),
    ]
    if task == "vqa":
        words.append("train.optimizer=bert_adam")  # which counts updates itself
    if task == "refcoco":
        words.append("phrases={weight: 1.0, layer: 1}")
    chosen = ENCODERS[encoder]
    if chosen is not None:
        more = {"nlvr2": {"max_images": 2}, "vcr": {"named_regions": True}}.get(task, {}) if encoder == "lxmert" else {}
        chosen = {**chosen, "config": chosen["config"] | more}
    photo = "images/train2014/*.jpg" if task == "refcoco" else None
    return {
        "photo": photo,
        "config": str(ROOT / "configs" / "tiny" / f"{task}.yaml"),
        "words": words,
        "encoder": chosen,
    }


needs_known_torch = pytest.mark.skipif(
    torch.version.cuda is None or not torch.__version__.startswith(("2.14.", "2.15.")),
    reason="the pretended GPU relies on internals of torch 2.14 and 2.15 with CUDA",
)


def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.pretended_gpu", json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_known_torch
def test_launches_of_the_base_model(tmp_path: Path):
    folders = [f"data.root={tmp_path / 'data'}", f"output={tmp_path / 'run'}"]
    words = [*NARROW_BASE, "train.mixed_precision=bf16", *folders]
    found = run([{"config": str(ROOT / "configs" / "benchmark" / "train_base.yaml"), "words": words}])[0]
    assert found["launches"] <= LAUNCHES and sum(found["step"].values()) <= GIVEN, found


@needs_known_torch
def test_launches_do_not_depend_on_boxes_and_texts_and_grow_little_with_images(tmp_path: Path):
    changes = {
        "boxes": ("data.synthetic.config.scene={min_objects: 10, max_objects: 10}",),
        "texts": ("data.texts_per_image=2",),
        "images": ("train.images_per_batch=4",),
    }
    base = ("data.boxes.train=gt", "detector.loss_weight=0", "data.texts_per_image=1", "train.mixed_precision=bf16")
    base += ("data.synthetic.config.scene={min_objects: 5, max_objects: 5}",)
    base += ("data.eval_splits=[]", "phrases={weight: 0}")
    jobs = []
    for name, words in {"": (), **changes}.items():
        refcoco = job("refcoco", "vl_bert", tmp_path / name)
        jobs.append(refcoco | {"photo": None, "words": [*refcoco["words"], *base, *words]})
    launches = [measured["launches"] for measured in run(jobs)]
    assert launches[1:3] == launches[:1] * 2
    assert launches[3] - launches[0] <= 2 * LAUNCHES_PER_IMAGE, launches


@needs_known_torch
@pytest.mark.parametrize("encoder", list(ENCODERS))
def test_waits_of_every_task(encoder: str, tmp_path: Path):
    tasks = TASKS if encoder == "vl_bert" else TASKS[:-1]  # the tiny pre-training has objectives of VL-BERT
    jobs = [job(task, encoder, tmp_path) for task in tasks]
    if encoder == "vl_bert":  # a step on a device without float64 raises no error
        jobs.append(job("refcoco", encoder, tmp_path / "without_float64") | {"photo": None, "without_float64": True})
    for task, found in zip(tasks, run(jobs), strict=False):
        limit = {"pretraining": PRETRAINING, "vcr": GIVEN}.get(task, PREDICTED)
        limit += (task, encoder) == ("nlvr2", "lxmert")  # the most regions of one image, for a pass per image
        assert sum(found["step"].values()) <= limit, (task, found["step"])
        if task == "refcoco":
            assert sum(found["ask"].values()) <= ASK, found
            assert sum(found["ask about boxes"].values()) <= ASK_GIVEN, found
            assert sum(found["regions"].values()) <= REGIONS, found
        for name, lines in found["evaluations"].items():
            # of refcoco the copy of its phrases
            extra = {"pretraining": 7, "vcr": 1, "refcoco": 1}.get(task, (task, encoder) == ("nlvr2", "lxmert"))
            assert sum(lines.values()) <= EVALUATION[name.split(", ")[1]] + extra, (task, name, lines)

"""What tests of whole runs share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request
from e2e_vl.io import read_log

if TYPE_CHECKING:  # they take long to import
    from e2e_vl.run.build import Run
    from e2e_vl.structures import Batch

ROOT = Path(__file__).parents[2]
TINY_DETECTOR = f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}"
SHORT = (  # two steps, each with a checkpoint
    *("train.max_steps=2", "train.save_every_epochs=0.01", "train.trackers=[]"),
    *("eval.every_epochs=0", "eval.boxes=[gt]", "eval.report_pictures=0"),
)
NARROW_BASE = (  # configs/benchmark/train_base.yaml, narrow but as deep as it is
    "train={max_steps: 2, images_per_batch: 2, trackers: []}",
    "detector.overrides.MODEL.RESNETS={STEM_OUT_CHANNELS: 4, RES2_OUT_CHANNELS: 8, WIDTH_PER_GROUP: 4}",
    *("encoder.config={hidden_size: 48, intermediate_size: 48}", "data.synthetic.scenes={train: 2}"),
    *("data.resize={short_edge: [32], long_edge: 40}", "data.workers=0", "data.eval_splits=[]"),
)


def tiny(name: str, data: Path, output: Path, *words: str) -> RunConfig:
    """Settings of configs/tiny/<name>.yaml with these folders and `key=value` words."""
    own = [TINY_DETECTOR, f"data.root={data}", f"output={output}", *words]
    return load_config(ROOT / "configs" / "tiny" / f"{name}.yaml", own)


def logged(run: str | Path, kind: str = "train") -> list[dict]:
    """The lines of the log of one kind: train, eval or final."""
    return [line for line in read_log(Path(run) / "log.jsonl") if line["kind"] == kind]


def predictions_of(run: str | Path, name: str = "val_gt") -> list[dict]:
    return json.loads((Path(run) / f"predictions_{name}.json").read_text("utf-8"))


def first_texts(run: Run, images: int | None = None, texts: int = 2) -> Batch:
    """The first texts about each of the first images, or of all, as in training."""
    groups = run.train_data.groups[:images]
    return run.collate([run.train_data[Request(number, tuple(group[:texts]))] for number, group in enumerate(groups)])


def lose_newest(run: Path, copy: Path) -> None:
    """Copy a run without its newest checkpoint, as if it had died after the one before."""
    shutil.copytree(run, copy)
    shutil.rmtree(sorted((copy / "checkpoints").iterdir())[-1])
    (copy / "metrics.json").unlink()


def assert_same_run(one: str | Path, other: str | Path) -> None:
    """Logs, weights and metrics are equal, bit for bit."""
    assert read_log(Path(one) / "log.jsonl") == read_log(Path(other) / "log.jsonl")
    for part in ("detector", "encoder", "task"):
        first, second = (load_file(Path(run) / "model" / part / "model.safetensors") for run in (one, other))
        assert set(first) == set(second)
        assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []
    first, second = (json.loads((Path(run) / "metrics.json").read_text()).items() for run in (one, other))
    assert [item for item in first if "/" in item[0]] == [item for item in second if "/" in item[0]]

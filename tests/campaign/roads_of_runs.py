"""The ways on which this project reads the files of a run: settings, log, metrics, predictions, models, checkpoints."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from e2e_vl.api import model as trained_model
from e2e_vl.config import load_config
from e2e_vl.io import RunLog, read_log
from e2e_vl.run.checkpoint import (
    complete_checkpoints,
    find_resumable,
    finished_metrics,
    is_run,
    load_model,
    read_position,
    saved_settings,
)
from e2e_vl.run.report import write_report
from tests.campaign.roads_of_files import Road, require

RUN = "run"  # below the drawn files
# files of a run that are no text, and what is only written: `test_hostile_files.py` reads the first ones damaged
UNREAD = (".safetensors", ".bin", ".pkl", ".html", ".yml", ".png")


def draw_run(root: Path, run: Path) -> None:
    """A copy of a run directory beside the drawn files."""
    shutil.copytree(run, root / RUN, ignore=shutil.ignore_patterns("tensorboard", "*.lock"))


def run_roads() -> list[Road]:
    return list(_roads())


def _roads() -> Iterator[Road]:
    yield Road("log of a run", None, lambda root: _log(root / RUN / "log.jsonl"))
    yield Road("log of a run that goes on", None, lambda root: _log_that_goes_on(root / RUN))
    yield Road("settings of a run", None, lambda root: require(is_run(root / RUN) in (True, False), ""))
    yield Road("settings as a config", None, lambda root: load_config(root / RUN / "config.yaml"))
    yield Road("report of a run", None, _report)
    yield Road("model of a run", None, lambda root: _model(root / RUN))
    yield Road("trained model", None, _trained_model)
    yield Road("model of a checkpoint", None, lambda root: _model(_checkpoint(root) / "model"))
    yield Road("position of a checkpoint", None, lambda root: _position(_checkpoint(root)))
    yield Road("checkpoint to go on from", None, _resume)
    yield Road("metrics of a run that has ended", None, lambda root: _finished(root / RUN))


def _checkpoint(root: Path) -> Path:
    return complete_checkpoints(root / RUN)[-1]


def _log(path: Path) -> None:
    for line in read_log(path):
        require(type(line["step"]) is int and line["step"] >= 0, f"no step: {line['step']!r}")
        require(isinstance(line["kind"], str), f"no kind: {line['kind']!r}")
        for name, value in line.items():
            if name not in ("step", "kind", "not_finite"):
                require(value is None or math.isfinite(value), f"{name} is {value!r}")


def _log_that_goes_on(run: Path) -> None:
    path = run / "log.jsonl"
    before = path.read_bytes()
    try:
        RunLog(path, enabled=True, resume_step=1)
        _log(path)
    finally:
        path.write_bytes(before)


@functools.cache
def _known(run: Path) -> tuple[Any, Any]:
    """Settings and task of the run, from its good files: the first road reads these."""
    config, model, _ = load_model(run)
    return config, model.task


def _report(root: Path) -> None:
    config, task = _known(root / RUN)
    page = write_report(root / RUN, config, task)
    require(page.stat().st_size > 1000, "the report is empty")


def _model(folder: Path) -> None:
    config, model, tokenizer = load_model(folder)
    require(all(bool(torch.isfinite(one).all()) for one in model.parameters()), "a weight is not finite")
    require(len(tokenizer) == model.encoder.config.vocab_size, "the encoder has another vocabulary")
    require(all(isinstance(piece, int) for piece in tokenizer.encode("a red box")), "wordpieces are not numbers")
    require(saved_settings(folder).task.name == config.task.name, "the settings are others")


def _trained_model(root: Path) -> None:
    found = trained_model.load(root / RUN, device="cpu")
    found.generate_model_card()


def _position(folder: Path) -> None:
    position = read_position(folder)
    for name in ("step", "processes"):
        require(type(position[name]) is int and position[name] >= 0, f"{name} is {position[name]!r}")


def _resume(root: Path) -> None:
    config, _ = _known(root / RUN)
    found = find_resumable(root / RUN, config, 1)
    require(found == _checkpoint(root), f"goes on from {found}")


def _finished(run: Path) -> None:
    metrics = finished_metrics(run, 1, is_over=True, patience=None)
    require(metrics is None or isinstance(metrics, dict), "no metrics")

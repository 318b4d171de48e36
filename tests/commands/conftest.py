"""Tiny trained runs that several tests of tools/predict.py share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e_vl.config import load_config
from tests.conftest import cpu_with_one_thread

ROOT = Path(__file__).parents[2]


def trained(folder: Path, name: str, *words: str) -> Path:
    from e2e_vl.engine.train import train

    own = [f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}", f"output={folder / 'run'}", *words]
    config = load_config(ROOT / "configs" / "tiny" / f"{name}.yaml", [*own, "train.max_steps=1"])
    with cpu_with_one_thread():
        train(config)
    return folder / "run"


@pytest.fixture(scope="session")
def vqa_run(tmp_path_factory) -> Path:
    """A run with a split `test` that has no annotations."""
    folder = tmp_path_factory.mktemp("vqa")
    run = trained(folder, "vqa", f"data.root={folder / 'data'}", "eval.boxes=[gt]")
    files = folder / "data" / "vqa"
    shutil.copy(
        files / "v2_OpenEnded_mscoco_val_questions.json",
        files / "v2_OpenEnded_mscoco_test_questions.json",
    )
    return run


@pytest.fixture(scope="session")
def vcr_runs(tmp_path_factory) -> tuple[Path, Path]:
    """Q->A and QA->R."""
    folder = tmp_path_factory.mktemp("vcr")
    root = f"data.root={folder / 'data'}"
    (folder / "qa2r").mkdir()
    return trained(folder, "vcr", root), trained(folder / "qa2r", "vcr", root, "data.config.question=rationale")


@pytest.fixture(scope="session")
def pretraining_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretraining")
    return trained(folder, "pretraining", f"data.root={folder / 'data'}")

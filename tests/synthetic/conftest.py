"""One small written data set that the tests of this folder look at, read with nothing of this project."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pycocotools.coco import COCO

from e2e_vl.synthetic import make_scenes

SPLITS = {"train": 110, "val": 20, "testA": 10, "testB": 10}


@pytest.fixture(scope="session")
def synthetic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "data"
    make_scenes(path, scenes=SPLITS, seed=11)
    return path


@pytest.fixture(scope="session")
def coco(synthetic_folder) -> COCO:
    return COCO(str(synthetic_folder / "refcoco+" / "instances.json"))


@pytest.fixture(scope="session")
def refs(synthetic_folder) -> list[dict]:
    return pickle.loads((synthetic_folder / "refcoco+" / "refs(unc).p").read_bytes())


@pytest.fixture(scope="session")
def said(refs) -> list[tuple[dict, dict]]:
    return [(ref, sentence) for ref in refs for sentence in ref["sentences"]]

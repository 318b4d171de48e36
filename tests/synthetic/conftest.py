"""One small data set in all formats, read with nothing of this project."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pycocotools.coco import COCO

from e2e_vl.synthetic.generate import make_scenes
from tests.synthetic.meaning import SPLITS


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

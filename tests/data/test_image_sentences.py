"""The data sets on LXMERT's files: splits that are joined, images without features, where images are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from e2e_vl.config import DataSettings
from e2e_vl.data.base import VLDataset
from e2e_vl.data.features import RegionFeatures, save_npz, write_tsv
from e2e_vl.data.lxmert import ImageSentenceDataset, ListedPairDataset, ScoredQuestionDataset
from e2e_vl.samples import CorrectChoice, ScoredAnswers
from tests.data.roads import open_dataset

SPLITS = {"train": ("a", "b"), "val": ("c",), "test": ("a",)}
KINDS = {
    "sentences": (ImageSentenceDataset, "sentences"),
    "questions": (ScoredQuestionDataset, "questions"),
    "pairs": (ListedPairDataset, "examples"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Features of the images a and c, not of b."""
    for split, names in SPLITS.items():
        label = {} if split == "test" else {"label": {"yes": 1.0}}
        content = {
            "sentences": [{"img_id": name, "sentf": {"vg": [f"{name} 0", f"{name} 1"]}} for name in names],
            "questions": [{"question_id": f"{split} {n}", "img_id": n, "sent": f"Is it {n}?", **label} for n in names],
            "pairs": [
                {"identifier": f"{split}-{n}", "img0": "a", "img1": n, "sent": n, **({"label": 1} if label else {})}
                for n in names
            ],
        }
        for kind, rows in content.items():
            (tmp_path / f"{split}_{kind}.json").write_text(json.dumps(rows), encoding="utf-8")
    for folder, names in (("first", "a"), ("second", "c")):
        (tmp_path / folder).mkdir()
        for name in names:
            save_npz(
                tmp_path / folder / f"{name}.npz",
                RegionFeatures(name, (9, 9), np.ones((1, 4), np.float32), np.ones((1, 2), np.float32)),
            )
    return tmp_path


def opened(root: Path, name: str, split: str, boxes: str = "online", *, training: bool = False, **options) -> VLDataset:
    kind, key = KINDS[name]
    sets = {"train": "first", "val": "second", "test": "first"}
    settings = DataSettings(
        name=name,
        root=str(root),
        files={key: f"{{split}}_{name}.json", "features": "{images}", "images": "photos/{images}"},
        config={"image_sets": sets, **options},
    )
    return open_dataset(kind, settings, split, boxes, training=training)


@pytest.mark.parametrize("name", KINDS)
def test_splits_are_joined_and_keep_their_images(root, name):
    dataset = opened(root, name, "train+val")
    places = [image.locate() for group in dataset.groups for image in dataset.sample(group).images]
    suffix = ".png" if name == "pairs" else ".jpg"
    assert {place.name for place in places} == {f"{one}{suffix}" for one in "abc"}
    assert places[-1] == root / "photos" / "second" / f"c{suffix}"
    assert [part["images"] for part in dataset.parts] == ["first", "second"]
    assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))
    with pytest.raises(ValueError, match="is in two of the splits"):
        opened(root, name, "train+train")


@pytest.mark.parametrize("name", KINDS)
def test_texts_without_features_are_left_out_when_asked_for(root, name, caplog):
    everything = opened(root, name, "train", "precomputed")
    kept = opened(root, name, "train", "precomputed", leave_out_unseen=True)
    assert "b" in everything.image_ids() and set(kept.image_ids()) == {"a"}
    assert "1 records of train have no features and are left out" in caplog.text
    with pytest.raises(ValueError, match="has features of no image of the split val"):
        opened(root, name, "val", "precomputed", leave_out_unseen=True, image_sets={"val": "first"})


@pytest.mark.parametrize("name", KINDS)
def test_the_first_rows_of_a_file_of_features(name, root, caplog):
    """Minival of LXMERT's code: the first 5,000 rows of val2014's features, in the order of the file."""
    one = np.ones((1, 4), np.float32)
    for file, names in (("rows.tsv", "acb"), ("others.tsv", "cab")):
        records = [RegionFeatures(image, (9, 9), one, np.ones((1, 2), np.float32)) for image in names]
        write_tsv(root / file, records, {})

    def of_rows(number: int, split: str = "train", file: str = "rows.tsv", boxes: str = "precomputed") -> VLDataset:
        return opened(root, name, "train", boxes, image_sets={"train": file}, first_rows={split: number})

    everything = opened(root, name, "train")
    assert set(of_rows(2).image_ids()) == {"a"} and "b" in everything.image_ids()
    assert "of train are behind row 2 and are left out" in caplog.text
    assert len(of_rows(3)) == len(of_rows(1, split="val")) == len(everything)  # enough rows; another split
    with pytest.raises(ValueError, match="has features of no image of the split train"):
        of_rows(1, file="others.tsv")
    with pytest.raises(ValueError, match=r"first: is a folder, which has no rows for data\.config\.first_rows\.train"):
        of_rows(1, file="first")
    with pytest.raises(ValueError, match=r"first_rows\.train counts rows of a file of boxes, but boxes are 'online'"):
        of_rows(1, boxes="online")
    with pytest.raises(ValueError, match=r"first_rows\.train is 0; it must be at least 1"):
        of_rows(0)


def test_truths(root):
    sentences = opened(root, "sentences", "train")
    assert list(sentences.truths()) == [None] * 4 and sentences[3] == "b 1"
    sample = sentences.sample([2])
    assert sample.pool is sentences and list(sample.own_texts) == [2, 3]
    assert list(opened(root, "questions", "train").truths()) == [ScoredAnswers({"yes": 1.0})] * 2
    [text] = opened(root, "pairs", "val").sample([0]).texts
    assert text.truth == CorrectChoice(1) and text.image_index == (0, 1) and text.metadata["label"] == "True"
    for name in ("questions", "pairs"):
        assert list(opened(root, name, "test").truths()) == [None]
        with pytest.raises(ValueError, match="the split test has no labels to learn from"):
            opened(root, name, "test", training=True)

"""LXMERT's files: what is read of them, joined splits, images without features, where images are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from e2e_vl.config import DataConfig
from e2e_vl.data import table_files
from e2e_vl.data.base import open_options
from e2e_vl.data.features import RegionFeatures, save_npz, write_tsv
from e2e_vl.data.lxmert import ImageSentenceDataset, ListedPairDataset, LXMERTDataset, ScoredQuestionDataset
from e2e_vl.samples import CorrectChoice, ScoredAnswers
from tests.data.helpers import assert_same_from_tables, open_dataset, refused, write_json

SPLITS = {"train": ("a", "b"), "val": ("c",), "test": ("a",)}
KINDS = {
    "image_sentences": (ImageSentenceDataset, "sentences"),
    "scored_questions": (ScoredQuestionDataset, "questions"),
    "listed_pairs": (ListedPairDataset, "examples"),
}
IMAGE = {"img_id": "a", "sentf": {"mscoco": ["A cat."], "vqa": ["Is it?", "So?"]}, "labelf": {"vqa": [{"yes": 1}, {}]}}
QUESTION = {"question_id": 7, "img_id": "a", "sent": "Is it?", "label": {"yes": 0.3}, "answer_type": "other"}
PAIR = {"identifier": "train-1-0-0", "img0": "a", "img1": "b", "sent": "So.", "label": 1, "uid": "u"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Features of the images a and c, not of b."""
    for split, names in SPLITS.items():
        label = {} if split == "test" else {"label": {"no": 0.3, "yes": 1.0}}
        content = {
            "image_sentences": [{"img_id": name, "sentf": {"vg": [f"{name} 0", f"{name} 1"]}} for name in names],
            "scored_questions": [
                {"question_id": f"{split} {n}", "img_id": n, "sent": f"Is it {n}?", **label} for n in names
            ],
            "listed_pairs": [
                {"identifier": f"{split}-{n}", "img0": "a", "img1": n, "sent": n, **({"label": 1} if label else {})}
                for n in names
            ],
        }
        for kind, rows in content.items():
            write_json(tmp_path / f"{split}_{kind}.json", rows)
    for folder, names in (("first", "a"), ("second", "c")):
        (tmp_path / folder).mkdir()
        for name in names:
            features = RegionFeatures(name, (9, 9), np.ones((1, 4), np.float32), np.ones((1, 2), np.float32))
            save_npz(tmp_path / folder / f"{name}.npz", features)
    return tmp_path


def settings_of(root: Path, name: str, **options) -> DataConfig:
    sets = {"train": "first", "val": "second", "test": "first"}
    files = {KINDS[name][1]: f"{{split}}_{name}.json", "features": "{images}", "images": "photos/{images}"}
    return DataConfig(name=name, root=str(root), files=files, config={"image_sets": sets, **options})


def opened(root: Path, name: str, split: str, boxes: str = "online", *, training: bool = False, **options):
    return open_dataset(KINDS[name][0], settings_of(root, name, **options), split, boxes, training=training)


@pytest.mark.parametrize("name", KINDS)
def test_splits_are_joined_and_keep_their_images(root, name):
    dataset = opened(root, name, "train+val")
    places = [image.locate() for group in dataset.groups for image in dataset.sample(group).images]
    suffix = ".png" if name == "listed_pairs" else ".jpg"
    assert {place.name for place in places} == {f"{one}{suffix}" for one in "abc"}
    assert places[-1] == root / "photos" / "second" / f"c{suffix}"
    assert [values["images"] for values in dataset.split_values] == ["first", "second"]
    assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))


@pytest.mark.parametrize("name", KINDS)
def test_texts_without_features_are_left_out_when_asked_for(root, name, caplog):
    everything = opened(root, name, "train", "precomputed")
    kept = opened(root, name, "train", "precomputed", skip_missing_images=True)
    assert "b" in everything.image_ids() and set(kept.image_ids()) == {"a"}
    number = 2 if name == "image_sentences" else 1
    assert f"skipped {number} of {2 * number} texts of train" in caplog.text


@pytest.mark.parametrize("name", KINDS)
def test_tables_give_the_same_texts(root, name, monkeypatch, caplog):
    features = root / "first.tsv"
    one = np.ones((1, 4), np.float32)
    write_tsv(features, [RegionFeatures("a", (9, 9), one, np.ones((1, 2), np.float32))], {})
    options = {"skip_missing_images": True, "image_sets": {"train": features.name}}
    assert_same_from_tables(
        root, monkeypatch, caplog, lambda: opened(root, name, "train", "precomputed", training=True, **options)
    )
    monkeypatch.undo()
    monkeypatch.setattr(table_files, "MIN_SOURCE_BYTES", 0)
    num_texts = len(opened(root, name, "train"))
    records = [RegionFeatures(image, (9, 9), one, np.ones((1, 2), np.float32)) for image in "ab"]
    write_tsv(features, records, {})
    assert len(opened(root, name, "train", "precomputed", **options)) == num_texts, "the file of features has changed"


def test_the_first_rows_of_a_file_of_features(root):
    """Minival of LXMERT's code: the first 5,000 rows of val2014's features, in the order of the file."""
    one = np.ones((1, 4), np.float32)
    records = [RegionFeatures(image, (9, 9), one, np.ones((1, 2), np.float32)) for image in "acb"]
    write_tsv(root / "rows.tsv", records, {})

    def of_rows(number: int, split: str = "train", file: str = "rows.tsv", boxes: str = "precomputed"):
        sets = {"train": file}
        return opened(root, "image_sentences", "train", boxes, image_sets=sets, first_rows={split: number})

    everything = opened(root, "image_sentences", "train")
    assert set(of_rows(2).image_ids()) == {"a"} and "b" in everything.image_ids()
    assert len(of_rows(3)) == len(of_rows(1, split="val")) == len(everything)  # enough rows; another split
    with refused("first_rows.train"):
        of_rows(1, file="first")
    with refused("first_rows.train", "online"):
        of_rows(1, boxes="online")


def test_truths_and_metadata(root):
    sentences = opened(root, "image_sentences", "train")
    assert list(sentences.truths()) == [None] * 4 and sentences[3] == "b 1"
    sample = sentences.sample([2])
    assert sample.pool is sentences and list(sample.own_texts) == [2, 3]
    assert sample.texts[0].metadata == {"image_id": "b", "uid": "b_vg_000", "source": "vg"}
    questions = opened(root, "scored_questions", "train")
    assert list(questions.truths()) == [ScoredAnswers({"no": 0.3, "yes": 1.0})] * 2
    [text] = questions.sample([0]).texts
    assert text.metadata == {"question_id": "train a", "image_id": "a"}
    options = open_options(ScoredQuestionDataset, settings_of(root, "scored_questions"))
    assert ScoredQuestionDataset.answers_of(*options, "train") == {"train a": "yes", "train b": "yes"}
    assert sorted(ScoredQuestionDataset.texts_of(*options, "val")) == ["Is it c?", "yes"]
    [text] = opened(root, "listed_pairs", "val").sample([0]).texts
    assert text.truth == CorrectChoice(1) and text.image_index == (0, 1) and set(text.metadata) == {"identifier"}
    for name in ("scored_questions", "listed_pairs"):
        assert list(opened(root, name, "test").truths()) == [None]
        with refused("no labels"):
            opened(root, name, "test", training=True)


def read(kind: type[LXMERTDataset], path: Path, **options):
    name = next(name for name, (own, _) in KINDS.items() if own is kind)
    return list(kind.read(path, settings_of(path.parent, name, **options).config))


def test_sentences_of_all_sources_or_some(tmp_path):
    path = write_json(tmp_path / "x.json", [IMAGE, {"img_id": "b", "sentf": {"vg": ["hat"]}}])
    assert [one.label for one in read(ImageSentenceDataset, path)] == [None, {"yes": 1.0}, {}, None]
    assert [one.image_id for one in read(ImageSentenceDataset, path, sources=["vg"])] == ["b"]
    assert read(ImageSentenceDataset, path, sources=["gqa"]) == []


@pytest.mark.parametrize(
    ("kind", "content", "parts"),
    [
        (ImageSentenceDataset, [IMAGE | {"labelf": {"vqa": [{}, {"no": "1"}]}}], ["labelf"]),
        (
            ImageSentenceDataset,
            [IMAGE | {"sentf": {"vqa": ["a"]}, "labelf": {"vqa": [{}, {}]}}],
            ["1 sentences of vqa"],
        ),
        (ScoredQuestionDataset, [QUESTION | {"sent": 3}], ["entry 0", "sent"]),
        (ListedPairDataset, [PAIR | {"label": "True"}], ["label"]),
    ],
)
def test_a_bad_record_is_named(tmp_path, kind, content, parts):
    path = write_json(tmp_path / "x.json", content)
    with refused("x.json", *parts):
        read(kind, path)

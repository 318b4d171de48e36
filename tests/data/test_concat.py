"""Several data sets as one: whose texts come in which order, which images are the same, whose boxes are read."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data.batching import Request
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.concat import JoinedDataset
from e2e_vl.data.features import RegionFeatures, save_npz
from e2e_vl.samples import HumanAnswers, PhraseBoxes, SampleText
from tests.data.helpers import examples, open_dataset, refused, write_json
from tests.data.tiny_readers import write_vqa
from tests.data.tiny_refcoco import TinyRefCOCO


def part(name: str, files: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"name": name, "splits": {"train": "train2014"}, "files": files} | more


@pytest.fixture
def settings(tiny: TinyRefCOCO) -> DataConfig:
    """Two captions of each of the photos 7, 3 and 9, and the questions about photos 7 and 3."""
    vqa = write_vqa(tiny)
    rows = [
        {"image_id": image["id"], "id": 10 * image["id"] + number, "caption": f"caption {image['id']} {number}"}
        for image in tiny.instances["images"]
        for number in range(2)
    ]
    root = Path(vqa.root)
    write_json(root / "captions.json", {"images": tiny.instances["images"], "annotations": rows})
    parts = {
        "said": part("captions", {"captions": "captions.json", "images": str(tiny.images_root)}, images="photos"),
        "asked": part("vqa", dict(vqa.files), images="photos", config=msgspec.to_builtins(vqa.config)),
    }
    return DataConfig(name="joined", root=vqa.root, config={"datasets": parts})


def changed(settings: DataConfig, member: str, **changes: Any) -> DataConfig:
    parts = msgspec.to_builtins(settings.config.datasets)
    return DataConfig(name="joined", root=settings.root, config={"datasets": parts | {member: parts[member] | changes}})


def opened(settings: DataConfig, boxes: BoxSource | str = "online", split: str = "train") -> JoinedDataset:
    return open_dataset(JoinedDataset, settings, split, boxes, training=True)


def test_texts_come_part_by_part(settings):
    dataset = opened(settings)
    captions, questions = (member.dataset for member in dataset.members)
    assert len(dataset) == len(captions) + len(questions)
    words = [dataset[number] for number in range(len(dataset))]
    assert words[:6] == [f"caption {image} {number}" for image in (7, 3, 9) for number in range(2)]
    assert words[6:] == [question.words for question in questions.texts]
    assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))
    assert list(dataset.truths()) == list(questions.truths())
    copy = pickle.loads(pickle.dumps(dataset))
    for group in dataset.groups:
        sample = copy.sample(group)
        assert [text.index for text in sample.texts] == list(group)
        assert [text.words for text in sample.texts] == [words[number] for number in group]


def test_all_texts_about_an_image_are_its_own(settings):
    dataset = opened(settings)
    by_image: dict[str, set[int]] = {}
    for group in dataset.groups:
        by_image.setdefault(dataset.sample(group[:1]).images[0].id, set()).update(group)
    assert set(by_image) == {"photos/7", "photos/3", "photos/9"}
    assert len(by_image["photos/9"]) == 2 < len(by_image["photos/7"])
    for group in dataset.groups:
        sample = dataset.sample(group[:1])
        assert sample.pool is dataset and set(sample.own_texts) == by_image[sample.images[0].id]
    apart = opened(changed(settings, "asked", images=None))
    sample = apart.sample(apart.groups[-1])
    assert set(sample.own_texts) == set(apart.groups[-1]) and sample.images[0].id.startswith("of asked/")


@pytest.mark.parametrize(
    ("name", "change", "selected"),
    [
        ("said", {"only_images": "some.txt"}, {"7", "9"}),
        ("said", {"without_images": "some.txt"}, {"3"}),
        ("asked", {"without_images": "some.txt"}, {"3"}),
    ],
)
def test_images_may_be_left_out(settings, name, change, selected):
    some = Path(settings.root) / "some.txt"
    some.write_text("7\n9\n")
    apart = {"said": {"images": "said"}, "asked": {"images": "asked"}}
    apart[name] |= change
    for part_name, changes in apart.items():
        settings = changed(settings, part_name, **changes)
    dataset = opened(settings)
    assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))
    samples = [dataset.sample(group) for group in dataset.groups]
    ids = [sample.images[0].id for sample in samples]
    assert {image_id.removeprefix(f"{name}/") for image_id in ids if image_id.startswith(name)} == selected
    for group, sample in zip(dataset.groups, samples, strict=True):
        assert [text.words for text in sample.texts] == [dataset[text] for text in group]
        if sample.images[0].id.startswith("said"):
            assert {text.words.split()[1] for text in sample.texts} == {sample.images[0].id.removeprefix("said/")}
    truths = [text.truth for sample in samples for text in sample.texts]
    assert list(dataset.truths()) == [truth for truth in truths if truth is not None]
    some.write_text("photo_7")
    with refused(f"datasets.{name}", "no image is left", "such as 7"):
        opened(changed(settings, name, only_images="some.txt", without_images=None))


def referring(tiny: TinyRefCOCO, images: str | None, **splits: str) -> dict[str, Any]:
    """A part with the expressions about the photos 7 and 3 (train), 9 (testA and testB)."""
    files = {"images": str(tiny.images_root), "instances": str(tiny.instances_file), "refs": str(tiny.refs_file)}
    return {"name": "refcoco", "splits": splits, "files": files, "images": images}


@pytest.mark.parametrize("images", ["photos", None])
def test_images_of_held_out_splits_are_left_out_of_training(settings, tiny, images, caplog):
    """They are the same images by the name of their set, or by their files."""
    parts = msgspec.to_builtins(settings.config.datasets)
    parts["said"]["images"] = images
    parts = {"said": parts["said"], "referring": referring(tiny, images, train="train", test="testA", other="testB")}
    config = {"datasets": parts, "held_out_splits": ["test", "other"]}
    held_out = DataConfig(name="joined", root=settings.root, config=config)
    caplog.set_level(logging.INFO, logger="e2e_vl.data.concat")
    dataset = opened(held_out)
    ids = [dataset.sample(group).images[0].id.rpartition("/")[2] for group in dataset.groups]
    assert ids == ["7", "3", "7", "3"]
    assert sorted(text for group in dataset.groups for text in group) == list(range(len(dataset)))
    [record] = caplog.records
    assert record.getMessage() == (
        "Training leaves out images that are in test, other: 1 of the 3 images of said, 0 of the 2 images of referring."
    )
    caplog.clear()
    evaluated = open_dataset(JoinedDataset, held_out, "test", "online", training=False)
    assert len(evaluated.groups) == 1 and not caplog.records


@pytest.mark.parametrize(
    ("held_out_split", "messages"), [("train", ("referring", "held_out_splits")), ("tset", ("the split tset",))]
)
def test_held_out_splits_that_leave_nothing_or_are_unknown(settings, tiny, held_out_split, messages):
    config = {"datasets": {"referring": referring(tiny, None, train="train")}, "held_out_splits": [held_out_split]}
    with refused(*messages):
        opened(DataConfig(name="joined", root=settings.root, config=config))


def test_each_part_reads_boxes_of_its_own(settings, tiny):
    """The same id may name another image in another part."""
    box = np.array([[1, 2, 11, 12]], np.float32)
    for name, value in (("said", 1.0), ("asked", 2.0)):
        folder = Path(settings.root) / name
        folder.mkdir()
        for image_id, size in (("7", (60, 100)), ("3", (80, 40)), ("9", (50, 50))):
            features = np.full((1, 3), value, np.float32)
            save_npz(folder / f"{image_id}.npz", RegionFeatures(image_id, size, box, features))
        files = settings.config.datasets[name].files
        settings = changed(settings, name, files=files | {"features": name}, images=None)
    dataset = opened(settings, "precomputed")
    made = examples(dataset, tiny.tokenizer, "precomputed")
    features = [made[Request(number, tuple(group))].images[0].features for number, group in enumerate(dataset.groups)]
    assert [values.tolist() for values in features] == [[[1.0] * 3]] * 3 + [[[2.0] * 3]] * 2
    (Path(settings.root) / "said" / "9.npz").unlink()
    with pytest.raises(ValueError, match=r"for image 9 of the split train of said"):
        opened(settings, "precomputed")


def test_parts_that_share_a_file_of_boxes_need_different_ids(settings, tiny):
    """Own data often number the photos from 1 in each part."""
    said = msgspec.to_builtins(settings.config.datasets["said"])
    said["files"]["instances"] = str(tiny.instances_file)
    other = said | {"files": said["files"] | {"images": "other"}}
    same = DataConfig(name="joined", root=settings.root, config={"datasets": {"said": said, "other": other}})
    assert len(opened(same, "gt").groups) == 6, "both parts have the images `photos`"
    for part in (said, other):
        part["images"] = None
    apart = DataConfig(name="joined", root=settings.root, config={"datasets": {"said": said, "other": other}})
    with refused(tiny.instances_file.name, "image 7", "split said", "split other"):
        opened(apart, "gt")
    assert len(opened(apart, "online").groups) == 6


def test_what_does_not_fit(settings):
    with refused("No data set in data.config.datasets", "split val", "of one"):
        opened(settings, split="val")
    with refused("vqa", "captoins"):
        opened(changed(settings, "asked", files={"captoins": "x"}))
    with refused("vqaa"):
        changed(settings, "asked", name="vqaa")
    with refused("splits"):
        changed(settings, "asked", splits={})


@pytest.mark.parametrize(
    ("has_phrases", "has_truths", "truth", "may_lack"),
    [
        (True, True, PhraseBoxes((), None), True),  # captions with phrases: a truth, of one kind
        (True, False, None, True),  # descriptions of regions: no text has a truth
        (True, True, None, False),  # a truth that is missing by mistake
        (False, True, HumanAnswers(("red",)), False),
        (False, False, None, False),  # captions alone
    ],
)
def test_which_texts_may_lack_a_target(settings, monkeypatch, has_phrases, has_truths, truth, may_lack):
    dataset = opened(settings)
    member = dataset.members[0]
    monkeypatch.setattr(CaptionDataset, "has_phrases", has_phrases)
    monkeypatch.setattr(CaptionDataset, "has_truths", has_truths)
    text = dataset._convert_text(SampleText(0, "red", {}, truth), 3, member)
    assert (text.index, text.truth, text.may_lack_target) == (3, truth, may_lack)
    again = opened(settings)
    assert (again.has_phrases, again.mixes_phrases) == (has_phrases, has_phrases), "questions have none"

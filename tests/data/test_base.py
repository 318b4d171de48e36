"""Files and options of the settings, and what all readers share."""

from __future__ import annotations

import functools
import types
from pathlib import Path

import pytest

from e2e_vl.config import BoxSource, DataSettings
from e2e_vl.data.base import DataFiles, DataNeeds, VLDataset, check_boxes_source
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco import CocoDetectionDataset
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.vcr import VCRDataset

KNOWN = ("images", "captions", "corpus")


def test_names_of_files_have_placeholders_and_start_from_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {"captions": "cc/{split}.json", "images": "/elsewhere/{images}", "corpus": "a.doc+{split}.doc"}
    found = DataFiles(DataSettings(name="captions", root="~/data", files=files), KNOWN)
    assert found.path("captions", split="val") == tmp_path / "data" / "cc" / "val.json"
    assert found.path("images", split="val", images="val2014") == Path("/elsewhere/val2014")
    assert found.name("corpus", split="val") == "a.doc+val.doc"
    assert "corpus" in found and "instances" not in found


def test_files_that_are_unknown_or_not_set():
    with pytest.raises(ValueError, match=r"data\.files of captions: the key"):
        DataFiles(DataSettings(name="captions", root=".", files={"image": "x"}), KNOWN)
    with pytest.raises(ValueError, match=r"data\.files\.corpus is not set; it names the corpus of captions"):
        DataFiles(DataSettings(name="captions", root="."), KNOWN).path("corpus")


@pytest.mark.parametrize(
    ("needs", "annotations"),
    [
        (DataNeeds(BoxSource.GT), True),
        (DataNeeds(BoxSource.DETECTIONS_GT), True),
        (DataNeeds(BoxSource.ONLINE), False),
        (DataNeeds(BoxSource.ONLINE, objects=True), True),
        (DataNeeds(BoxSource.PRECOMPUTED, training=True), False),
    ],
)
def test_when_annotations_are_read(needs, annotations):
    assert needs.annotations is annotations


def test_sources_of_boxes_that_make_sense():
    check_boxes_source(RefCOCODataset, "refcoco", BoxSource.DETECTIONS_GT)
    for kind, name, source, known in (
        (VCRDataset, "vcr", BoxSource.ONLINE, "gt"),
        (CocoDetectionDataset, "coco_detection", BoxSource.GT, "online"),
        (CaptionDataset, "captions", BoxSource.DETECTIONS_GT, "gt, detections, online, precomputed"),
    ):
        message = rf"{name} cannot have boxes from '.*'; set data\.boxes\.train and eval\.boxes to one of {known}\."
        with pytest.raises(ValueError, match=message):
            check_boxes_source(kind, name, source)


def test_classes_are_compared_by_name_where_the_names_are_known():
    dataset = types.SimpleNamespace(class_names=["person", "Traffic light"])
    check = functools.partial(VLDataset.check_classes, dataset)
    check(2)
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"have 2 categories, but the detector has {number} classes; set MODEL"):
            check(number)
    check(2, ("person", "trafficlight"))
    check(3, ("person", "traffic_light", "boat"))  # the first ones mean the same
    with pytest.raises(ValueError, match=r"Class 1 is 'Traffic light' in the data, but 'boat' to the detector's"):
        check(3, ("person", "boat", "traffic light"))
    with pytest.raises(ValueError, match="have 2 categories, but the detector has 1 classes"):
        check(1, ("person",))
    dataset.class_names = None
    check(5)

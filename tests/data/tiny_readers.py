"""Every reader on the photos of the tiny RefCOCO: what holds for one data set holds for all of them."""

from __future__ import annotations

from e2e_vl.config import DataSettings
from e2e_vl.data.base import VLDataset
from e2e_vl.data.captions import CaptionDataset
from e2e_vl.data.coco import CocoDetectionDataset
from e2e_vl.data.refcoco import RefCOCODataset
from e2e_vl.data.vqa import VQADataset
from tests.data.helpers import open_dataset, write_json
from tests.data.tiny_refcoco import TinyRefCOCO
from tests.data.tiny_vqa import write_vqa


def settings_of(tiny: TinyRefCOCO, name: str, files: dict[str, str]) -> DataSettings:
    return DataSettings(name=name, root=str(tiny.images_root.parent), files=files)


def refcoco(tiny: TinyRefCOCO) -> RefCOCODataset:
    return open_dataset(RefCOCODataset, tiny.settings, "train", "gt")


def coco_detection(tiny: TinyRefCOCO) -> CocoDetectionDataset:
    files = {"images": "images", "instances": "instances.json"}
    return open_dataset(CocoDetectionDataset, settings_of(tiny, "coco_detection", files), "train")


def vqa(tiny: TinyRefCOCO) -> VLDataset:
    return open_dataset(VQADataset, write_vqa(tiny), "train2014", "gt", training=True)


def captions(tiny: TinyRefCOCO) -> CaptionDataset:
    rows = [
        {"image_id": image["id"], "id": number, "caption": f"a {colour} square"}
        for image in tiny.instances["images"]
        for number, colour in enumerate(("red", "blue"))
    ]
    write_json(tiny.images_root.parent / "captions.json", {"images": tiny.instances["images"], "annotations": rows})
    files = {"images": "images", "instances": "instances.json", "captions": "captions.json"}
    return open_dataset(CaptionDataset, settings_of(tiny, "captions", files), "train", objects=True)


READERS = {reader.__name__: reader for reader in (refcoco, coco_detection, vqa, captions)}

"""The table of published weights, how names are told from paths, downloads into a cache, and files of names."""

from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gdown
import pytest
import requests
import torch
from torchvision import models
from torchvision.models import detection

import detector.checkpoint
import detector.zoo
from detector.checkpoint import EXPECT, find_weights, read_weights
from detector.config import DetectorConfig
from detector.errors import MissingFileError, UserError
from detector.zoo import (
    PUBLISHED,
    PublishedWeights,
    cache_folder,
    download_weights,
    find_published_weights,
    published_weights,
    read_vocabulary,
    resolve_weights,
)

ROOT = Path(__file__).parents[2]
BY_NAME = {weights.name: weights for weights in published_weights()}
PUBLISHERS = ("torchvision/", "detectron2/", "bottom-up-attention/")
V2 = "torchvision/fasterrcnn_resnet50_fpn_v2-coco"
R50 = "detectron2/ImageNetPretrained/MSRA/R-50"


def test_names_addresses_and_files_are_unique():
    ends = [weights.name.rpartition("/")[2] for weights in published_weights()]  # by which they may be named
    assert len(set(ends)) == len(ends)
    for field in ("name", "address", "file"):
        values = [getattr(weights, field).lower() for weights in published_weights()]
        assert len(set(values)) == len(values), field


@pytest.mark.parametrize("weights", published_weights(), ids=lambda weights: weights.name)
def test_entry(weights: PublishedWeights):
    assert weights.name.startswith(PUBLISHERS)
    assert re.fullmatch(r"https://[\w.-]+/.+", weights.address)
    assert re.fullmatch(r"[\w.-]+\.(pth|pkl|bin)", weights.file)
    assert weights.expect in EXPECT
    if weights.checksum:
        algorithm, digits = weights.checksum.split(":")
        assert re.fullmatch(r"[0-9a-f]{6}|[0-9a-f]{8}|[0-9a-f]{64}", digits) and hasattr(hashlib, algorithm)
        assert digits[:6] in weights.file
    classes = DetectorConfig.from_yaml(weights.config_path).roi_heads.num_classes
    names = weights.read_class_names()
    if names is not None:
        assert len(names) == classes
        assert all(name and name == name.strip() for name in names)
    elif weights.expect == "all":
        assert weights.name.startswith("bottom-up-attention/") and classes == 1600


@pytest.mark.parametrize("name", ["R_50_C4", "R_101_C4", "bottom_up_attention", "bottom_up_attention_caffe"])
def test_configs_of_the_repository_are_the_same(name: str):
    paths = (ROOT / "configs" / "detector" / f"{name}.yaml", PUBLISHED / f"{name}.yaml")
    assert DetectorConfig.from_yaml(paths[0]) == DetectorConfig.from_yaml(paths[1])


@pytest.mark.parametrize(
    "weights", [one for one in published_weights() if one.name.startswith("torchvision/")], ids=lambda one: one.name
)
def test_torchvision_agrees(weights: PublishedWeights):
    builder, version = weights.name.removeprefix("torchvision/").split("-")
    enum = models.get_model_weights(builder)["COCO_V1" if version == "coco" else version.upper()]
    assert weights.address == enum.url
    assert weights.checksum.startswith(f"sha256:{enum.url.removesuffix('.pth')[-8:]}")
    names = weights.read_class_names()
    assert names is None if weights.expect != "all" else list(names) == enum.meta["categories"][1:]


def test_coco_names_are_the_ids_in_use():
    with_gaps, names = (
        BY_NAME[name].read_class_names() for name in (V2, "detectron2/COCO-Detection/faster_rcnn_R_50_C4_1x")
    )
    assert names == tuple(name for name in with_gaps if name != "N/A")
    assert (names[0], names[79], with_gaps[0], with_gaps[89]) == ("person", "toothbrush", "person", "toothbrush")


def test_numbers_of_torchvision():
    """The constants of torchvision's models that no comparison of detections and losses shows."""
    model = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    config = DetectorConfig.from_yaml(BY_NAME[V2].config_path)
    rpn, heads, transform = model.rpn, model.roi_heads, model.transform
    assert [config.input.min_size_test, config.input.max_size_test] == [transform.min_size[0], transform.max_size]
    assert [config.rpn.pre_nms_topk_train, config.rpn.pre_nms_topk_test] == list(rpn._pre_nms_top_n.values())
    assert [config.rpn.post_nms_topk_train, config.rpn.post_nms_topk_test] == list(rpn._post_nms_top_n.values())
    for ours, theirs in ((config.rpn, rpn.fg_bg_sampler), (config.roi_heads, heads.fg_bg_sampler)):
        assert ours.batch_size_per_image == theirs.batch_size_per_image
        assert ours.positive_fraction == theirs.positive_fraction
    assert config.roi_heads.detections_per_image == heads.detections_per_img
    assert config.roi_heads.score_thresh == heads.score_thresh
    version_1 = DetectorConfig.from_yaml(BY_NAME["torchvision/fasterrcnn_resnet50_fpn-coco"].config_path)
    assert (version_1.fpn.norm, version_1.resnet.norm) == ("", "FrozenBN")
    assert (config.fpn.norm, config.resnet.norm, config.box_head.norm) == ("BN", "BN", "BN")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (R50, R50),
        ("detectron2://ImageNetPretrained/MSRA/R-50.pkl", R50),
        ("https://dl.fbaipublicfiles.com/detectron2/ImageNetPretrained/MSRA/R-50.pkl", R50),
        (
            "detectron2://COCO-Detection/faster_rcnn_R_50_FPN_3x/137849458/model_final_280758.pkl",
            "detectron2/COCO-Detection/faster_rcnn_R_50_FPN_3x",
        ),
        ("fasterrcnn_resnet50_fpn_v2-coco", V2),
        ("faster_rcnn_R_101_FPN_3x", "detectron2/COCO-Detection/faster_rcnn_R_101_FPN_3x"),
        ("COCO-Detection/faster_rcnn_R_101_FPN_3x.yaml", "detectron2/COCO-Detection/faster_rcnn_R_101_FPN_3x"),
        ("bua-caffe-frcn-r101-k36", "bottom-up-attention/bua-caffe-frcn-r101-k36"),
    ],
)
def test_names_ends_of_names_and_addresses(given: str, name: str):
    for value in (given, Path(given)):
        assert resolve_weights(value) is find_published_weights(value) is BY_NAME[name]


@pytest.mark.parametrize("name", ["weights.pth", "./torchvision/x.pth", "C:/weights/x.pth", "mask_rcnn/model.pth"])
def test_everything_else_is_a_path(name: str):
    assert resolve_weights(name) == Path(name)
    assert find_published_weights(name) is None


def test_a_file_that_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = Path(V2)
    path.parent.mkdir()
    path.write_bytes(b"x")
    assert resolve_weights(V2) == path
    assert find_published_weights(tmp_path / "fasterrcnn_resnet50_fpn_v2_coco-dd69338a.pth") is BY_NAME[V2]
    assert find_published_weights(tmp_path / "other.pth") is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torchvision/fasterrcnn_resnet50_fpn_v2", V2),
        ("fasterrcnn_resnet50_fpn_v2", V2),
        ("bottom-up-attention/rcnn_from_caffe", "bottom-up-attention/faster_rcnn_from_caffe"),
        ("torchvision/", "torchvision"),
        ("detectron2://COCO-Detection/other.pkl", "is a URL"),
        ("https://example.com/weights.pth", "is a URL"),
        ("some/folder", "some/folder"),
    ],
)
def test_unknown_names_are_named_with_the_nearest_ones(name: str, hint: str):
    with pytest.raises(UserError, match=hint):
        find_weights(name)


def test_the_page_about_detectors_names_what_there_is():
    page = (ROOT / "docs" / "detectors.md").read_text("utf-8")
    names = re.findall(rf"(?:{'|'.join(PUBLISHERS)})[\w./-]*\w(?![\w.]*\.\.)", page)
    assert len(names) >= 9
    for name in names:
        assert isinstance(resolve_weights(name), PublishedWeights), name


CONTENT = bytes(range(256)) * 200
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ADDRESS = "https://example.org/file"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of torch.hub. Each download of `CONTENT` adds a line to `log` beside it."""

    def download(address: str, file: str, **_: object) -> None:
        assert address == ADDRESS
        with (tmp_path / "log").open("a") as log:
            log.write(f"{address}\n")
        part = Path(f"{file}12345678.part")  # as gdown does
        part.write_bytes(CONTENT[:100])
        time.sleep(0.2)  # other processes ask for the file meanwhile
        part.write_bytes(CONTENT)
        part.rename(file)

    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(gdown, "download", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hub" / "checkpoints"
    return cache_folder()


def entry(checksum: str = f"sha256:{SHA256}") -> PublishedWeights:
    return PublishedWeights("torchvision/test", ADDRESS, "test.pth", "R_50_C4", checksum)


@pytest.mark.parametrize("checksum", [f"sha256:{SHA256[:8]}", f"md5:{hashlib.md5(CONTENT).hexdigest()[:6]}", ""])
def test_a_file_is_downloaded_once(cache: Path, checksum: str):
    for _ in range(2):
        assert download_weights(entry(checksum=checksum)) == cache / "test.pth"
    assert (cache / "test.pth").read_bytes() == CONTENT
    assert (cache.parents[1] / "log").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("checksum", "content"),
    [("sha256:00000000", CONTENT), ("md5:000000", CONTENT), ("", b" <!DOCTYPE html><html>"), ("", b"")],
)
def test_another_file_is_rejected_and_stays(cache: Path, checksum: str, content: bytes):
    path = cache / "test.pth"
    cache.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        download_weights(entry(checksum=checksum))
    assert path.read_bytes() == content


def test_a_failed_download_leaves_nothing_under_the_name_of_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def cut_off(address: str, file: str, **_: object) -> None:
        Path(f"{file}12345678.part").write_bytes(CONTENT[:100])  # the next call goes on with it
        raise requests.ConnectionError("connection reset")

    monkeypatch.setattr(gdown, "download", cut_off)
    with pytest.raises(MissingFileError, match=f"torchvision/test.*{ADDRESS}.*connection reset.*{cache}"):
        download_weights(entry())
    assert "test.pth" not in [path.name for path in cache.iterdir()]


def test_without_the_library_for_downloads_its_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingFileError, match=r"torchvision/test.*e2e-vl\[download\].*test\.pth"):
        download_weights(entry())


def test_files_in_the_cache_can_be_read_by_others(cache: Path):
    assert download_weights(entry()).stat().st_mode & 0o444 == 0o444


def fetch(_: int) -> str:
    return hashlib.sha256(download_weights(entry()).read_bytes()).hexdigest()


def test_of_several_processes_one_downloads_and_all_see_the_whole_file(cache: Path):
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(fetch, range(3))) == [SHA256] * 3
    assert (cache.parents[1] / "log").read_text().count("\n") == 1


def test_weights_are_read_by_name_and_by_the_name_of_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name, file = "torchvision/fasterrcnn_resnet50_fpn-coco", "fasterrcnn_resnet50_fpn_coco-258fb6c6.pth"
    monkeypatch.setattr(detector.checkpoint, "download_weights", lambda weights: tmp_path / weights.file)
    torch.save({"x": torch.ones(2)}, tmp_path / file)
    for given in (name, tmp_path / file):
        found = read_weights(given)
        assert (found.norm_eps, found.path, found.tensors["x"].tolist()) == (0.0, tmp_path / file, [1, 1])


def test_vocabulary(tmp_path: Path):
    """As bottom-up attention publishes it: synonyms behind commas, no line for the background."""
    path = tmp_path / "objects_vocab.txt"
    path.write_text("yolk\ngoal,net\n bathroom \n", encoding="utf-8")
    assert read_vocabulary(path, 3, "classes") == ("yolk", "goal", "bathroom")
    path.write_text("a\n\nc\n")
    with pytest.raises(UserError, match=r"objects_vocab\.txt .*3 classes"):
        read_vocabulary(path, 3, "classes")

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from detector.checkpoint import (
    check_arrays,
    load_checkpoint,
    load_weights,
    read_class_names,
    read_tensors,
    save_weights,
)
from detector.config import DetectorConfig
from detector.errors import MissingFileError, UserError
from detector.faster_rcnn import FasterRCNN
from e2e_vl.registry import DETECTORS
from tests.detector import published
from tests.detector.test_io import LYING_DTYPES, scalar

TREE = {
    "RESNETS": {"DEPTH": 18, "NORM": "BN", "STEM_OUT_CHANNELS": 8, "RES2_OUT_CHANNELS": 8, "WIDTH_PER_GROUP": 4},
    "BACKBONE": {"FREEZE_AT": 0},
    "ROI_HEADS": {"NUM_CLASSES": 3},
}


def make(**sections) -> FasterRCNN:
    return FasterRCNN(DetectorConfig.from_yaml({"MODEL": {**TREE, **sections}}))


def test_weights_settings_and_class_names_are_saved_and_loaded(tmp_path: Path):
    attributes = {"ATTRIBUTES": {"NUM_CLASSES": 2, "EMBEDDING_DIM": 4, "HIDDEN_DIM": 4}}
    for names in (("größe 0", "größe 1", "größe 2"), None):
        model = FasterRCNN(DetectorConfig.from_yaml({"MODEL": {**TREE, "ROI_BOX_HEAD": attributes}}), names)
        loaded = published.load_detector(published.save_detector(model, tmp_path / "folder"))
        assert loaded.config == model.config and loaded.class_names == names
        states = model.state_dict(), loaded.state_dict()
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for content in ("[", "[1, 2]", '["a", "b", "c", "d", "e", "f", "g"]'):
        (tmp_path / "folder" / "class_names.json").write_text(content)
        with pytest.raises(UserError, match=r"class_names\.json"):
            published.load_detector(tmp_path / "folder")


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("config.yaml", None, ["INPUT.FORMAT BGR", "MODEL.PIXEL_MEAN [103.53"]),  # as it was saved
        ("config.yaml", "INPUT: {FORMAT: RGB}\nMODEL: {PIXEL_STD: [1, 1, 57.0]}", ["PIXEL_STD [1.0, 1.0, 57.0]"]),
        ("model.yaml", "MODEL: {PIXEL_MEAN: [0, 0, 0]}", ["MODEL.PIXEL_MEAN [0.0, 0.0, 0.0]"]),
        ("config.yaml", "INPUT: {FORMAT: RGB}", None),
        ("config.yaml", "detector: {config: x.yaml}\nINPUT: 3", None),  # of another program
        ("config.yaml", "{", None),
    ],
)
def test_weights_of_other_conventions_than_the_file_beside_them_says(tmp_path: Path, caplog, file, content, parts):
    published.save_detector(make(), tmp_path)
    if content is not None:
        (tmp_path / "config.yaml").unlink()
        (tmp_path / file).write_text(content)
    tree = {"MODEL": {**TREE, "PIXEL_MEAN": [123.675, 116.28, 103.53]}, "INPUT": {"FORMAT": "RGB"}}
    load_checkpoint(FasterRCNN(DetectorConfig.from_yaml(tree)), tmp_path / "model.safetensors")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (parts is not None)
    assert all(part in messages[0] and file in messages[0] for part in parts or ())


def test_misfits_are_counted_and_named_and_nothing_is_loaded():
    model, other = make(), make(ROI_HEADS={"NUM_CLASSES": 5})
    tensors = other.state_dict()
    del tensors["backbone.stem.conv1.weight"]
    tensors["roi_heads.mask_head.weight"] = torch.zeros(1)
    before = copy.deepcopy(model.state_dict())
    message = (
        r"x\.pth does not fit .* 1 missing \(backbone\.stem\.conv1\.weight\), 1 unexpected \(roi_heads\.mask_head"
        r".*4 mismatched \(roi_heads\.box_predictor\.cls_score\.weight \[6, 64\] -> \[4, 64\]"
    )
    with pytest.raises(UserError, match=message):
        load_weights(model, tensors, "x.pth")
    tensors = make().state_dict()
    for number in (float("nan"), float("inf")):
        tensors["backbone.stem.conv1.weight"].view(-1)[3] = number
        with pytest.raises(UserError, match=r"x\.pth: backbone\.stem\.conv1\.weight"):
            load_weights(model, tensors, "x.pth")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_batch_norm_weights_fit_frozen_batch_norms():
    trained = make()
    frozen = make(BACKBONE={"FREEZE_AT": 2})
    load_weights(frozen, trained.state_dict(), "x.pth")
    load_weights(trained, frozen.state_dict(), "y.pth")
    assert torch.equal(frozen.backbone.res2[0].conv1.weight, trained.backbone.res2[0].conv1.weight)


def test_the_mean_in_old_checkpoints_must_agree_with_the_config():
    with pytest.raises(UserError, match=r"x\.pth: its pixel_mean .* differs from MODEL.PIXEL_MEAN"):
        load_weights(make(), {"pixel_mean": torch.tensor([1.0, 2.0, 3.0])}, "x.pth")


def test_files_that_are_not_weights(tmp_path: Path, plain: FasterRCNN):
    with pytest.raises(MissingFileError, match=r"none\.pth"):
        read_tensors(tmp_path / "none.pth")
    torch.save({"model": np.load}, tmp_path / "code.pth")
    torch.save({"model": {"epoch": 3}}, tmp_path / "other.pth")
    torch.save({"encoder.weight": torch.zeros(1)}, tmp_path / "encoder.pth")
    published.write_pickle(tmp_path / "text.pkl", {"w": "text"})
    published.write_pickle(tmp_path / "list.pkl", [1])
    for name in ("text.pth", "text.safetensors"):
        (tmp_path / name).write_text("not weights")
    (tmp_path / "page.pth").write_text("<!DOCTYPE html><html>")
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "empty.pkl").touch()
    faults = {"page.pth": "HTML page", "pointer.safetensors": "pointer of Git LFS", "empty.pkl": "an empty file"}
    faults |= {"code.pth": "no code in it was executed", "encoder.pth": "unknown layout", "text.pth": "cannot be read"}
    faults |= {"text.safetensors": "cannot be read"}
    faults |= dict.fromkeys(("other.pth", "text.pkl", "list.pkl"), "not a tensor")
    for name, fault in faults.items():
        with pytest.raises(UserError, match=f"{name}.*{fault}"):
            load_checkpoint(plain, tmp_path / name)


class Settings(dict):
    """Settings of a training, as frameworks save them beside the weights."""


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 3


WEIGHTS = {"a.w": torch.ones(2)}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        {"model": WEIGHTS, "args": argparse.Namespace(lr=1.0, path=PurePosixPath("x"))},
        {"model": WEIGHTS, "best": np.float64(2), "losses": np.arange(3.0), "names": np.array(["a"])},
        {"state_dict": {f"model.{name}": value for name, value in WEIGHTS.items()}, "hyper_parameters": Settings(a=1)},
        {"net": {f"module._orig_mod.{name}": value for name, value in WEIGHTS.items()}, "settings": Slots()},
        {"model_state_dict": OrderedDict(WEIGHTS), "epoch": 3, "optimizer": {"state": {}}},
        {"model": {"state_dict": {"a._orig_mod.w": torch.ones(2)}}},
        {"model": WEIGHTS, "meters": deque([1.0], maxlen=20), "counts": defaultdict(int, a=1), "range": range(3)},
        {"model": WEIGHTS, "optimizer": functools.partial(max, 1), "generator": np.random.default_rng(0)},
    ],
)
def test_weights_are_read_whatever_is_beside_and_around_them(tmp_path: Path, content: dict, is_zip: bool):
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=is_zip)
    assert list(read_tensors(tmp_path / "a.pth")) == ["a.w"]


@pytest.mark.parametrize(("save", "name"), [(save_file, "a.pth"), (save_file, "a.bin"), (torch.save, "a.safetensors")])
def test_the_content_of_a_file_tells_its_format(tmp_path: Path, save: Callable[..., None], name: str):
    save({f"_orig_mod.{key}": value for key, value in WEIGHTS.items()}, tmp_path / name)
    assert list(read_tensors(tmp_path / name)) == ["a.w"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"model": WEIGHTS, "net": WEIGHTS}, "has weights under model and net"),
        (torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear.* instead of a state dict"),
        ({"model": WEIGHTS, "x": np.array([1, "a"], dtype=object)}, "dtype 'O8' is not allowed"),
        ({"model": WEIGHTS, "x": scalar(LYING_DTYPES["record of objects"])}, "dtype 'V8' is not allowed"),
        ({0: torch.ones(2)}, "0 is not a tensor"),
        ({"model": {}}, "'model' is not a tensor"),
        ({"a.w": torch.ones(2, device="meta")}, "'a.w' is a strided tensor of float32 on the device meta"),
        ({"a.w": torch.ones(2, dtype=torch.complex64)}, "'a.w' is a strided tensor of complex64"),
        ({"a.w": torch.ones(2).to(torch.float8_e4m3fn)}, "'a.w' is a strided tensor of float8"),
        ({"a.w": torch.ones(2).to_sparse()}, "'a.w' is a sparse_coo tensor"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, content: object, fault: str):
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(UserError, match=rf"a\.pth: .*{fault}"):
        read_tensors(tmp_path / "a.pth")


def test_arrays_that_lie_are_found_before_others_read_them(tmp_path: Path):
    path = tmp_path / "random_states_0.pkl"
    for content in (np.random.default_rng(0).bit_generator.state, {"keys": np.arange(3, dtype=np.uint32)}, {"a": 1}):
        torch.save(content, path)
        check_arrays(path)
    torch.save({"keys": scalar(LYING_DTYPES["record of objects"])}, path)
    with pytest.raises(UserError, match=r"random_states_0\.pkl: .*dtype 'V8' is not allowed"):
        check_arrays(path)


def test_a_backbone_alone_from_a_detector_of_other_classes(tmp_path: Path, plain: FasterRCNN):
    state = plain.state_dict()
    save_weights(state, tmp_path / "a.pth")
    tree = copy.deepcopy(published.WITHOUT_ATTRIBUTES)
    tree["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] = 9
    model = published.make(tree, 3)
    report = load_checkpoint(model, tmp_path / "a.pth", expect="backbone")
    assert len(report.unexpected) == len(report.missing) == 10
    assert "unexpected: 10\n  proposal_generator.rpn_head.conv.weight\n" in str(report)
    del state["backbone.res3.0.conv1.weight"]
    save_weights(state, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"1 missing \(backbone\.res3\.0\.conv1\.weight\)"):
        load_checkpoint(model, tmp_path / "a.pth", expect="backbone")


@pytest.mark.parametrize("tree", [published.TREE, published.FPN_TREE], ids=["C4 with attributes", "FPN"])
def test_everything_but_the_classes_from_a_detector_of_other_classes(tmp_path: Path, tree: dict):
    state = published.make(tree, 0).state_dict()
    save_weights(state, tmp_path / "a.pth")
    tree = copy.deepcopy(tree)
    tree["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] = 9
    tree["MODEL"]["ROI_BOX_HEAD"].pop("ATTRIBUTES", None)
    model = published.make(tree, 3)
    start = copy.deepcopy(model.state_dict())
    load_checkpoint(model, tmp_path / "a.pth", expect="no_predictor")
    for name, value in model.state_dict().items():
        assert torch.equal(value, (start if "box_predictor" in name else state)[name]), name
    del state["proposal_generator.rpn_head.conv.weight"]
    save_weights(state, tmp_path / "a.pth")
    with pytest.raises(UserError, match="1 missing"):
        load_checkpoint(model, tmp_path / "a.pth", expect="no_predictor")


def test_names_of_another_number_of_classes_speak_of_the_config_first(tmp_path: Path):
    """The detector is built with the names, so this comes before the weights are seen not to fit the config."""
    (tmp_path / "class_names.json").write_text('["dog", "cat"]')
    save_weights({}, tmp_path / "model.safetensors")
    assert read_class_names(tmp_path, 2) == ("dog", "cat")
    with pytest.raises(UserError, match=r"has 2 class names, .*config has 3 classes; use the config .*no_predictor"):
        read_class_names(tmp_path, 3)


def test_without_detectron2_choosing_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("detectron2.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "detectron2", None)  # makes `import detectron2` fail, installed or not
    monkeypatch.delitem(sys.modules, "detector.detectron2_backend", raising=False)
    with pytest.raises(UserError, match="python -m pip install 'git"):
        DETECTORS["detectron2"].cls  # noqa: B018
    assert DETECTORS["builtin"].cls is FasterRCNN

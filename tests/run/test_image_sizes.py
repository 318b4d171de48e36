"""`data.resize: null`: the sizes of the detector's YAML file."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from e2e_vl.api.model import load
from e2e_vl.config import ResizeSettings, differences, load_config, save_config
from e2e_vl.data import batching as collate
from e2e_vl.data.batching import Request
from e2e_vl.run.build import build_run, resolve
from e2e_vl.run.evaluate import evaluate_run, predict_split
from e2e_vl.run.train import train
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
TESTED_AT_96 = "{MIN_SIZE_TRAIN: [96, 112, 128], MAX_SIZE_TRAIN: 160, MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 160}"


def test_the_sizes_are_those_of_the_yaml_file_and_are_saved_with_the_run(tiny_config):
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={TESTED_AT_96}")
    assert config.data.resize is None
    resolved = resolve(config)
    assert resolved.data.resize == ResizeSettings([112, 128, 96], 160, "detectron2")  # testing takes the last
    assert resolve(resolved) == resolved
    assert config.data.resize is None  # settings never change
    train_data = build_run(msgspec.structs.replace(resolved, output=f"{config.output}_built")).train_data
    assert {rule.short_edge for rule in train_data.loader.rules.resize} == {112, 128, 96}
    train(replaced(config, train={"max_steps": 1}, eval={"boxes": ["gt"]}))
    for name in ("config.yaml", "model/config.yaml"):
        assert load_config(Path(config.output) / name).data.resize == resolved.data.resize


def test_a_range_is_every_size_in_it(tiny_config):
    sizes = TESTED_AT_96.replace("[96, 112, 128]", "[94, 97]").replace("{", "{MIN_SIZE_TRAIN_SAMPLING: range, ")
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={sizes}")
    assert resolve(config).data.resize.short_edge == [94, 95, 97, 96]


@pytest.mark.parametrize("change", [("MIN_SIZE_TEST: 96", "MIN_SIZE_TEST: 100"), ("TEST: 160", "TEST: 200")])
def test_sizes_that_cannot_be_expressed_are_an_error(tiny_config, change):
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={TESTED_AT_96.replace(*change)}")
    with pytest.raises(ValueError, match=r"tests at other sizes than it trains at .*write data.resize yourself"):
        resolve(config)


def test_the_detection_config_trains_at_the_sizes_of_detectron2(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = resolve(load_config(ROOT / "configs" / "detection" / "R_50_C4_1x.yaml", ["data.root=unused"]))
    assert config.data.resize == ResizeSettings([640, 672, 704, 736, 768, 800], 1333, "detectron2")
    own = load_config(
        ROOT / "configs" / "detection" / "R_50_C4_1x.yaml", ["data.root=unused", "data.resize.short_edge=[600]"]
    )
    assert own.data.resize.short_edge == [600]
    assert differences(own, config)


def test_the_canvas_of_the_settings_reaches_the_batches(tiny_config):
    for canvas, expected in (("null", None), ("[200,240]", (200, 240))):
        run = build_run(tiny_config(f"data.canvas={canvas}"))
        images = run.collate([run.train_data[Request(0, (run.train_data.groups[0][0],))]]).images
        assert images.pixels.shape[2:] == (expected or tuple(images.sizes[0].tolist()))


def test_a_trained_model_sees_images_on_the_canvas_of_its_settings(trained_run, tmp_path, monkeypatch, on_cpu):
    """In evaluation, in predictions of a split, and when it is asked about one image."""
    run = tmp_path / "run"
    shutil.copytree(trained_run.path / "model", run / "model")
    path = run / "model" / "config.yaml"
    config = load_config(path, ["data.canvas=[200, 240]"])
    save_config(config, path)
    seen, make = [], collate.make_image_batch

    def made(*words, **more):
        images = make(*words, **more)
        seen.append(tuple(images.pixels.shape[2:]))
        return images

    monkeypatch.setattr(collate, "make_image_batch", made)
    image = next((Path(config.data.root) / "images" / "train2014").iterdir())
    for action in (
        lambda: evaluate_run(run, split="val", boxes="gt"),
        lambda: predict_split(run, split="val", boxes="gt", output=tmp_path / "val.json"),
        lambda: load(run).ask(image, "the circle"),
    ):
        seen.clear()
        action()
        assert seen and set(seen) <= {(200, 240), (240, 200), (240, 240)}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "vcr").glob("vl_bert_*.yaml")), ids=lambda path: path.stem)
def test_images_of_vcr_lie_on_the_official_canvas(path):
    """Its official code alone pads to a fixed size, which the resize rule has, too."""
    data = load_config(path, ["data.root=unused"]).data
    assert data.canvas == (*data.resize.short_edge, data.resize.long_edge) == (600, 1200)
    pretraining = load_config(ROOT / "configs" / "pretraining" / "vl_bert_base_e2e.yaml", ["data.root=unused"])
    assert pretraining.data.canvas is None

"""`data.resize: null`: the sizes of the detector's YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.config import ResizeSettings, differences, load_config
from e2e_vl.data.examples import Request
from e2e_vl.engine.build import build_run, take_sizes_of_detector

ROOT = Path(__file__).parents[2]
TESTED_AT_96 = "{MIN_SIZE_TRAIN: [96, 112, 128], MAX_SIZE_TRAIN: 160, MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 160}"


def test_the_sizes_are_those_of_the_yaml_file_and_are_saved_with_the_run(tiny_config):
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={TESTED_AT_96}")
    assert config.data.resize is None
    build_run(config)  # testing takes the last size
    assert config.data.resize == ResizeSettings([112, 128, 96], 160, "detectron2")
    before = config.data.resize
    take_sizes_of_detector(config)
    assert config.data.resize is before


def test_a_range_is_every_size_in_it(tiny_config):
    sizes = TESTED_AT_96.replace("[96, 112, 128]", "[94, 97]").replace("{", "{MIN_SIZE_TRAIN_SAMPLING: range, ")
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={sizes}")
    take_sizes_of_detector(config)
    assert config.data.resize.short_edge == [94, 95, 97, 96]


@pytest.mark.parametrize("change", [("MIN_SIZE_TEST: 96", "MIN_SIZE_TEST: 100"), ("TEST: 160", "TEST: 200")])
def test_sizes_that_cannot_be_expressed_are_an_error(tiny_config, change):
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={TESTED_AT_96.replace(*change)}")
    with pytest.raises(ValueError, match=r"tests at other sizes than it trains at .*write data.resize yourself"):
        build_run(config)


def test_the_detection_config_trains_at_the_sizes_of_detectron2(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "configs" / "detection" / "R_50_C4_1x.yaml", ["data.root=unused"])
    take_sizes_of_detector(config)
    assert config.data.resize == ResizeSettings([640, 672, 704, 736, 768, 800], 1333, "detectron2")
    own = load_config(
        ROOT / "configs" / "detection" / "R_50_C4_1x.yaml", ["data.root=unused", "data.resize.short_edge=[600]"]
    )
    assert own.data.resize.short_edge == [600]
    assert differences(own, config)


def test_the_canvas_of_the_settings_reaches_the_batches(tiny_config):
    for canvas, expected in (("null", None), ("[200,240]", (200, 240))):
        run = build_run(tiny_config(f"data.canvas={canvas}"))
        images = run.collate([run.train_dataset[Request(0, (run.train_dataset.groups[0][0],))]]).images
        assert images.pixels.shape[2:] == (expected or tuple(images.sizes[0].tolist()))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "vcr").glob("*.yaml")), ids=lambda path: path.stem)
def test_images_of_vcr_lie_on_the_official_canvas(path):
    """Its official code alone pads to a fixed size, that of the resize rule."""
    data = load_config(path, ["data.root=unused"]).data
    assert data.canvas == [*data.resize.short_edge, data.resize.long_edge] == [600, 1200]
    pretraining = load_config(ROOT / "configs" / "pretraining" / "vl_bert_base_e2e.yaml", ["data.root=unused"])
    assert pretraining.data.canvas is None

"""The folder of a data set: same settings, same files; nothing half-written or foreign is taken for one."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from e2e_vl.synthetic import generate
from e2e_vl.synthetic.config import RenderingConfig, SceneConfig
from e2e_vl.synthetic.generate import make_scenes


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SMALL = {"scenes": {"train": 4, "val": 2}, "seed": 5}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "small"
    make_scenes(path, **SMALL)
    return path


def test_number_of_processes_changes_nothing(small, tmp_path):
    make_scenes(tmp_path / "data", **SMALL, workers=2)  # in chunks of one scene
    assert contents(tmp_path / "data") == contents(small)


def test_other_seed_gives_other_scenes_and_more_training_scenes_keep_the_others(small, tmp_path):
    make_scenes(tmp_path / "seed", **{**SMALL, "seed": 6})
    make_scenes(tmp_path / "more", **{**SMALL, "scenes": {"train": 5, "val": 2}})
    images = {
        name: [path.read_bytes() for path in sorted((folder / "images/train2014").iterdir())]
        for name, folder in (("small", small), ("seed", tmp_path / "seed"), ("more", tmp_path / "more"))
    }
    assert not set(images["small"]) & set(images["seed"])
    assert images["more"][:4] == images["small"][:4]
    assert images["more"][5:] == images["small"][4:]


PALE = RenderingConfig(blur=1.0, contrast=0.3, brightness=40, noise=8.0, palette={"red": (10, 200, 190)})


def test_rendering_changes_pixels_and_nothing_else(small, tmp_path):
    make_scenes(tmp_path / "pale", **SMALL, rendering=PALE)
    make_scenes(tmp_path / "again", **SMALL, rendering=PALE, workers=2)
    pale = contents(tmp_path / "pale")
    assert contents(tmp_path / "again") == pale
    clean = contents(small)
    assert pale.keys() == clean.keys()
    changed = [name for name in pale if pale[name] != clean[name]]
    with_images = [name for name in pale if name.endswith((".jpg", ".png", ".tar", "_image.zip"))]
    with_images += [name for name in pale if name.endswith(".parquet") and "refs" not in name]
    assert set(changed) == {*with_images, "synthetic.json"}
    stamp = json.loads(pale["synthetic.json"])
    assert msgspec.convert(stamp["settings"].pop("rendering"), RenderingConfig) == PALE
    assert stamp == json.loads(clean["synthetic.json"]), "the default is not written, so earlier folders stay valid"
    with pytest.raises(ValueError, match=r"other settings \(rendering\)"):
        make_scenes(small, **SMALL, rendering=PALE)


def test_two_that_start_together_draw_once(tmp_path, monkeypatch):
    calls, draw = [], generate._map_scenes

    def slowly(*arguments):
        calls.append(arguments)
        time.sleep(0.3)  # longer than the other one needs to come here
        return draw(*arguments)

    monkeypatch.setattr(generate, "_map_scenes", slowly)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(make_scenes, tmp_path / "new" / "data", **SMALL, formats=["refcoco+"]) for _ in range(2)]
    assert jobs[0].result() == jobs[1].result()
    assert len(calls) == 1


def test_a_second_call_does_nothing_and_other_settings_are_an_error(small):
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    assert make_scenes(small, **SMALL) == json.loads((small / "synthetic.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        make_scenes(small, **{**SMALL, "seed": 6})
    with pytest.raises(ValueError, match=r"other settings \(scene\)"):
        make_scenes(small, **SMALL, config=SceneConfig(max_objects=8))


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="not empty and was not written by this tool"):
        make_scenes(tmp_path, **SMALL)


def test_png_and_unequal_sides(tmp_path):
    config = SceneConfig(min_side=112, max_side=144, textures=["plain", "striped", "dotted"])
    make_scenes(tmp_path / "data", scenes={"train": 3}, seed=0, config=config, image_format="png")
    images = json.loads((tmp_path / "data/refcoco+/instances.json").read_text())["images"]
    assert len({(image["height"], image["width"]) for image in images}) == 3
    for image in images:
        assert image["file_name"].endswith(".png")
        with Image.open(tmp_path / "data/images/train2014" / image["file_name"]) as picture:
            assert (picture.format, picture.size) == ("PNG", (image["width"], image["height"]))


def test_formats_are_added_as_written_among_all_and_nothing_else_changes(small, tmp_path, monkeypatch):
    folder, stamp = tmp_path / "data", tmp_path / "data" / "synthetic.json"

    def make(*formats: str) -> dict:
        return make_scenes(folder, **SMALL, formats=formats or None)

    def interrupt(*formats: str) -> None:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(generate, "_statistics", lambda *_: 1 / 0)
            make(*formats)

    interrupt("vqa", "conceptual")
    assert not stamp.exists()
    make("vqa", "conceptual")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"images", "vqa", "conceptual"}
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert make("vqa", "captions")["formats"] == ["captions", "conceptual", "vqa"]
    assert [path for path, time in before.items() if path.stat().st_mtime_ns != time] == [stamp]
    interrupt()
    assert json.loads(stamp.read_text())["formats"] == ["captions", "conceptual", "vqa"], "finished ones are left"
    make()
    assert contents(folder) == contents(small)

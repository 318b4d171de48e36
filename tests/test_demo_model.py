"""The model that comes along: its stamp, its size, its examples, and what it finds in scenes that are drawn anew."""

from __future__ import annotations

import numpy as np
import pytest

import e2e_vl
import package_demo
from e2e_vl.config import BoxSource
from e2e_vl.config_files import CONFIGS, differences, load_config, save_config
from e2e_vl.io import DEMO
from e2e_vl.run.build import make_synthetic_data, open_split
from e2e_vl.synthetic.scenes import box_iou


def test_it_is_small_and_has_the_settings_and_scores_of_the_demo(demo_model):
    changed = differences(load_config(DEMO / "config.yaml"), load_config(CONFIGS / "demo" / "refcoco.yaml"))
    assert not [line for line in changed if not line.startswith("detector.config:")], "tools/package_demo.py"
    assert sum(path.stat().st_size for path in DEMO.rglob("*")) <= 5e6
    card = (DEMO / "README.md").read_text("utf-8")
    assert card == demo_model.generate_model_card("demo").content, "save the card again"
    assert "test/accuracy_predicted_boxes" in card and "- shape: circle, square, " in card
    assert f'"e2e_vl_version": "{e2e_vl.__version__}"' in (DEMO / "config.json").read_text("utf-8")
    assert demo_model.regions(demo_model.examples[0].image)[0].attribute == "", "taught boxes and classes only"
    assert {"red", "furthest", "thing"} <= {*demo_model.knows["word"]} and "striped" in demo_model.knows["texture"]


def is_found(answer, box) -> bool:
    return answer.box is None if box is None else answer.box is not None and box_iou(answer.box, box) >= 0.5


def test_its_examples_are_twelve_scenes_that_it_mostly_understands(demo_model):
    found = []
    unsure = []
    for scene in demo_model.examples:
        for answer, box in zip(demo_model.ask(scene.image, scene.texts), scene.boxes, strict=True):
            found.append(is_found(answer, box))
            unsure.append(answer.is_unsure)
    found, unsure = np.array(found), np.array(unsure)
    assert len(demo_model.examples) == 12 and len(found) >= 40 and found.mean() >= 0.9
    assert unsure[found].mean() < min(0.25, unsure[~found].mean())


def test_it_finds_what_newly_drawn_expressions_refer_to(demo_model, tmp_path):
    words = [
        f"data.root={tmp_path}",
        "data.workers=0",
        "data.synthetic.seed=1000",
        "data.synthetic.scenes={train: 1, val: 1, test: 40}",
    ]
    words += ["data.synthetic.config.language={refs_per_image: [2, 3], sentences_per_ref: [2, 3]}"]
    config = load_config("demo/refcoco", words)
    make_synthetic_data(config)
    data, found = open_split(config, "test", BoxSource.ONLINE, training=False), []
    for group in data.groups:
        sample = data.sample(list(group))
        answers = demo_model.ask(sample.images[0].file, [text.words for text in sample.texts])
        pairs = zip(answers, sample.texts, strict=True)
        found += [is_found(answer, *text.truth.boxes) for answer, text in pairs if text.truth.boxes]
    assert len(found) >= 200 and np.mean(found) >= 0.93, (len(found), np.mean(found))


def test_the_command_copies_scenes_and_refuses_a_run_with_other_settings(tiny_config, tmp_path, capsys):
    scenes = package_demo.copy_scenes(tiny_config(), tmp_path / "images", "val")
    assert len(scenes) == 6 and all((tmp_path / scene["image"]).is_file() and scene["texts"] for scene in scenes)
    other = load_config("demo/refcoco", ["train.lr=1"])
    (tmp_path / "encoder").mkdir()
    save_config(other, tmp_path / "config.yaml")
    before = DEMO.stat().st_mtime
    assert package_demo.main([str(tmp_path)]) == 2 and DEMO.stat().st_mtime == before
    assert "settings of demo/refcoco: train.lr: 1.0 -> 0.002" in capsys.readouterr().err


def test_it_knows_its_limits(demo_model, tmp_path, monkeypatch):
    scene = demo_model.examples[2]
    answer = demo_model.ask(scene.image, "the small red circle")
    assert answer.box is None and answer.phrases[0].box is None and not answer.warnings
    photo = np.full((100, 200, 3), 128, dtype=np.uint8)
    with pytest.warns(UserWarning, match="synthetic scenes of 128 pixels only; this image has 200 x 100"):
        assert demo_model.ask(photo, "the red thing").is_unsure


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("the triangle closest to the striped star", "Unsure: fewer than 95 %"),
        ("the cross next to the striped square", "Unsure: fewer than 95 %"),
        ("!!!", "The text names nothing"),
        ("the of a", "The text names nothing"),
        ("x y", "The text names nothing"),
        ("the zebra of the blorb", "Not in the vocabulary of demo: zebra, blorb"),
    ],
)
def test_answers_that_may_be_worth_little_are_marked(demo_model, text, doubt):
    image = demo_model.examples[2].image
    with pytest.warns(UserWarning, match=doubt):
        answer = demo_model.ask(image, text)
    assert answer.is_unsure and answer.prediction.is_unsure and answer.marked_lines[0] == f"{answer.lines[0]} (unsure)"
    assert any(warning.startswith(doubt) for warning in answer.warnings)
    assert all(label.endswith(", unsure") for label, _ in answer.answer_boxes)
    sure = demo_model.ask(image, demo_model.examples[2].texts[1])
    assert not sure.is_unsure and not sure.warnings and sure.marked_lines == sure.lines
    boxes = [[104, 52, 123, 69], [87, 58, 122, 92]]
    assert demo_model.ask(image, "!!!", boxes=boxes).is_unsure, "given boxes have a threshold of their own"


def test_its_thresholds_are_saved_with_it(demo_model, tmp_path):
    image = demo_model.examples[2].image
    text = "the triangle closest to the striped star"
    demo_model.save_pretrained(tmp_path)
    assert e2e_vl.load(tmp_path, "cpu").ask(image, text).is_unsure
    (tmp_path / "metrics.json").unlink()
    assert not e2e_vl.load(tmp_path, "cpu").ask(image, text).is_unsure, "without a threshold none is marked"
    assert "marked unsure below a certainty of" in (tmp_path / "README.md").read_text("utf-8")


def test_its_name_is_known_in_every_folder(demo_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert e2e_vl.load_detector("demo").network.num_classes == len(demo_model.knows["shape"])

from __future__ import annotations

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import e2e_vl
from detector.checkpoint import save_pretrained
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from e2e_vl.api.detector import TrainedDetector
from e2e_vl.cli import extract_demo
from e2e_vl.config import DataSettings, DetectorSettings, EncoderSettings, ResizeSettings, RunConfig, TaskSettings
from e2e_vl.run.build import build_model
from e2e_vl.run.checkpoint import save_model
from e2e_vl.text import build_vocabulary, load_tokenizer

TINY = """
MODEL:
  RESNETS: {DEPTH: 18, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 8}
  ANCHOR_GENERATOR: {SIZES: [[16, 32, 64]]}
  RPN: {PRE_NMS_TOPK_TEST: 200, POST_NMS_TOPK_TEST: 50}
  ROI_HEADS: {NUM_CLASSES: 5}
  ROI_BOX_HEAD: {POOLER_RESOLUTION: 4}
INPUT: {MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 160}
"""
FEATURES = 64  # 8 times RES2_OUT_CHANNELS

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    return extract_demo


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


def pixels(h: int, w: int, channels: int = 3, dtype: type = np.uint8) -> np.ndarray:
    shape = (h, w, channels) if channels > 1 else (h, w)
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def write_image(folder: Path, kind: str) -> tuple[Path, tuple[int, int]]:
    """A file and the (height, width) that its boxes refer to."""
    path = folder / ("image.png" if kind != "cmyk" else "image.jpg")
    size = {"thin": (2, 900), "tall": (900, 2), "large": (3000, 4000), "dot": (1, 1)}.get(kind, (70, 110))
    if kind == "grey":
        image = Image.fromarray(pixels(*size, 1))
    elif kind == "rgba":
        image = Image.fromarray(pixels(*size, 4))
    elif kind == "16 bit":
        image = Image.fromarray(pixels(*size, 1, np.uint16))
        assert image.mode == "I;16"
    elif kind == "palette":
        image = Image.fromarray(pixels(*size)).convert("P")
    elif kind == "cmyk":
        image = Image.fromarray(pixels(*size)).convert("CMYK")
    elif kind == "large":
        image = Image.new("L", size[::-1], 90)
    else:
        image = Image.fromarray(pixels(*size))
    exif = Image.Exif()
    if kind == "rotated":
        exif[0x0112] = 6
        size = size[::-1]
    image.save(path, exif=exif)
    return path, size


KINDS = ("rgb", "grey", "rgba", "16 bit", "palette", "cmyk", "rotated", "thin", "tall", "large")


@pytest.mark.parametrize("kind", KINDS)
def test_any_image(tool: types.ModuleType, config: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture):
    image, (height, width) = write_image(tmp_path, kind)
    assert tool.main([str(image), "--output", str(tmp_path / "out"), "--config", str(config)]) == 0
    assert "random" in capsys.readouterr().out

    regions = np.load(tmp_path / "out" / "regions.npz")
    boxes, scores, classes, features = (regions[name] for name in ("boxes", "scores", "classes", "features"))
    number = len(boxes)
    assert 1 <= number <= 36
    if kind not in ("thin", "tall"):
        assert number >= 10
    assert boxes.shape == (number, 4) and boxes.dtype == np.float32
    assert scores.shape == (number,) and scores.dtype == np.float32
    assert classes.shape == (number,) and classes.dtype == np.int64
    assert features.shape == (number, FEATURES) and features.dtype == np.float32
    assert np.isfinite(features).all() and features.any()
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] < boxes[:, 2:]).all()
    assert (boxes[:, 2:] <= [width, height]).all()
    # Random boxes lie everywhere, so they also tell whether the scale was undone (and the right side taken as width).
    assert boxes[:, 2].max() > 0.6 * width and boxes[:, 3].max() > 0.6 * height
    assert (np.diff(scores) <= 0).all() and (classes < 5).all()
    with Image.open(tmp_path / "out" / "regions.png") as picture:
        assert picture.mode == "RGB" and min(picture.size) >= 100 and 480 <= max(picture.size) <= 1400


def test_one_pixel(tool: types.ModuleType, config: Path, tmp_path: Path):
    image, _ = write_image(tmp_path, "dot")
    assert tool.main([str(image), "--output", str(tmp_path / "out"), "--config", str(config)]) == 0
    boxes = np.load(tmp_path / "out" / "regions.npz")["boxes"]
    assert boxes.shape[1] == 4 and (boxes >= 0).all() and (boxes <= 1).all()


def test_same_seed_same_regions(tool: types.ModuleType, config: Path, tmp_path: Path):
    image, _ = write_image(tmp_path, "rgb")
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = [str(image), "--output", str(tmp_path / name), "--config", str(config), "--seed", str(seed)]
        assert tool.main(arguments) == 0
        found.append(np.load(tmp_path / name / "regions.npz")["features"])
    assert np.array_equal(found[0], found[1])
    assert found[0].shape != found[2].shape or not np.array_equal(found[0], found[2])


def test_number_of_regions(tool: types.ModuleType, config: Path, tmp_path: Path):
    image, _ = write_image(tmp_path, "rgb")
    arguments = [str(image), "--output", str(tmp_path), "--config", str(config), "--min-score", "1"]
    for option, expected in ((["--min-regions", "3"], 3), (["--max-regions", "2"], 2), (["--min-regions", "0"], 0)):
        assert tool.main([*arguments, *option]) == 0
        arrays = np.load(tmp_path / "regions.npz")
        assert arrays["boxes"].shape == (expected, 4) and arrays["features"].shape == (expected, FEATURES)


@pytest.mark.parametrize("as_folder", [False, True])
def test_weights_from_a_file(
    tool: types.ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture, as_folder: bool
):
    image, _ = write_image(tmp_path, "rgb")
    torch.manual_seed(5)
    detector = FasterRCNN(DetectorConfig.from_yaml(config))
    file = tmp_path / "model.safetensors"
    save_file({key: value.contiguous() for key, value in detector.state_dict().items()}, file)
    weights = ["--weights", str(tmp_path if as_folder else file)]
    found = []
    for seed in ("0", "1"):
        arguments = [str(image), "--output", str(tmp_path / "out"), "--config", str(config), "--seed", seed, *weights]
        assert tool.main(arguments) == 0
        found.append(np.load(tmp_path / "out" / "regions.npz")["features"])
    assert "random" not in capsys.readouterr().out
    assert np.array_equal(*found)  # the seed no longer matters


def test_a_detector_by_its_folder(tool: types.ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    image, _ = write_image(tmp_path, "rotated")
    detector = FasterRCNN(DetectorConfig.from_yaml(config)).eval()
    detector.class_names = tuple(f"thing {number}" for number in range(detector.num_classes))
    save_pretrained(detector, tmp_path / "saved")
    arguments = [str(image), "--output", str(tmp_path / "out")]
    assert tool.main([*arguments, "--detector", str(tmp_path / "saved")]) == 0
    by_folder = np.load(tmp_path / "out" / "regions.npz")["features"]
    weights = str(tmp_path / "saved" / "model.safetensors")
    assert tool.main([*arguments, "--config", str(config), "--weights", weights]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "regions.npz")["features"], by_folder)
    assert "random" not in capsys.readouterr().out
    assert tool.main([*arguments, "--detector", str(tmp_path / "saved"), "--weights", weights]) == 2
    assert "both name weights" in capsys.readouterr().err


def test_names_of_classes_from_a_file(
    tool: types.ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    image, _ = write_image(tmp_path, "rgb")
    names = tmp_path / "objects_vocab.txt"
    pictures = []
    for words in ("a b c d e", "violin xylophone quince jacaranda wisteria"):
        names.write_text("".join(f"{word},synonym\n" for word in words.split()))
        arguments = [str(image), "--output", str(tmp_path), "--config", str(config), "--class-names", str(names)]
        assert tool.main(arguments) == 0
        pictures.append(np.asarray(Image.open(tmp_path / "regions.png")))
    assert pictures[0].shape == pictures[1].shape and (pictures[0] != pictures[1]).any()
    capsys.readouterr()
    assert_error(tool, [*arguments, "--attribute-names", str(names)], "no attribute head", capsys)
    names.write_text("one")
    assert_error(tool, arguments, "names 1 classes, but the detector has 5", capsys)


def test_phrase(trained_run, tool: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture):
    """The files hold what the Python API answers and draws."""
    record = json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))[0]
    words = [record["file_name"], "--output", str(tmp_path), "--run", str(trained_run.path)]
    assert tool.main([*words, "--text", "the red elephant"]) == 0
    model = e2e_vl.load(trained_run.path)
    with pytest.warns(UserWarning, match="lacks elephant"):
        expected = model.ask(record["file_name"], "the red elephant")
    found = json.loads((tmp_path / "phrase.json").read_text("utf-8"))
    assert found["box"] == pytest.approx(expected.box, abs=1e-3) and found["text"] == "the red elephant"
    assert len(found["boxes"]) == len(found["scores"]) == len(expected.record["candidate_boxes"])
    printed = capsys.readouterr()
    assert f'"the red elephant" is at {expected.answer} (score' in printed.out and printed.err == ""
    assert "words that the vocabulary lacks: elephant\n" in printed.out
    pictures = {"phrase.png": expected.draw(), "regions.png": model.regions(record["file_name"]).draw()}
    for name, picture in pictures.items():
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(picture))


def test_all_proposals_of_the_config_are_used(
    trained_run, tool: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    record = json.loads((trained_run.path / "predictions_val_gt.json").read_text("utf-8"))[0]
    used = []
    find = TrainedDetector.find

    def spied(self, *arguments):
        used.append(self.network.config.rpn.post_nms_topk_test)
        return find(self, *arguments)

    monkeypatch.setattr(TrainedDetector, "find", spied)
    words = [record["file_name"], "--output", str(tmp_path), "--run", str(trained_run.path)]
    assert tool.main(words) == 0 and tool.main([*words, "--max-proposals", "7"]) == 0
    e2e_vl.load_detector(trained_run.path).regions(record["file_name"])
    assert used == [used[2], 7, used[2]] and used[2] > 7


@pytest.mark.parametrize("broken", ["missing", "text", "empty", "cut off", "folder"])
def test_bad_image(tool: types.ModuleType, config: Path, tmp_path: Path, broken: str, capsys: pytest.CaptureFixture):
    image = tmp_path / "image.png"
    if broken == "text":
        image.write_text("no image")
    elif broken == "empty":
        image.touch()
    elif broken == "cut off":
        write_image(tmp_path, "rgb")
        image.write_bytes(image.read_bytes()[:2000])
    elif broken == "folder":
        image.mkdir()
    assert_error(tool, [str(image), "--output", str(tmp_path / "out"), "--config", str(config)], "image.png", capsys)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(tool: types.ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    image, _ = write_image(tmp_path, "rgb")
    start = [str(image), "--output", str(tmp_path / "out")]
    assert_error(tool, [*start, "--text", "the cat"], "--run", capsys)
    assert_error(tool, [*start, "--run", str(tmp_path / "no_run"), "--text", "the cat"], "no_run", capsys)
    assert_error(tool, [*start, "--config", str(tmp_path / "no.yaml")], "no.yaml", capsys)
    assert_error(tool, [*start, "--config", str(config), "--weights", str(tmp_path / "no.bin")], "no.bin", capsys)
    assert_error(tool, [*start, "--config", str(config), "--max-regions", "0"], "max_regions", capsys)
    assert_error(tool, [*start, "--config", str(config), "--max-proposals", "0"], "proposals", capsys)
    numbers = ["--max-regions", "3", "--min-regions", "50"]
    assert_error(tool, [*start, "--config", str(config), *numbers], "--min-regions 50", capsys)
    assert_error(tool, [*start, "--config", str(config), "--min-regions", "50"], "--max-regions 36", capsys)
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text("MODEL: {RESNETS: {DEEPTH: 50}}")
    assert_error(tool, [*start, "--config", str(unknown)], "DEEPTH", capsys)
    (tmp_path / "file").touch()
    arguments = [str(image), "--config", str(config), "--output", str(tmp_path / "file")]
    assert_error(tool, arguments, "file", capsys)


def assert_error(tool: types.ModuleType, arguments: list[str], word: str, capsys: pytest.CaptureFixture) -> None:
    assert tool.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and word in message


def test_default_detector_from_any_folder(
    tool: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The command without options: ResNet-101 with 2048 features, whatever the current directory is."""
    Image.fromarray(pixels(60, 60)).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    assert tool.main(["image.png", "--output", "out", "--max-proposals", "20", "--max-regions", "12"]) == 0
    assert capsys.readouterr().out.count("random") == 1
    regions = np.load(tmp_path / "out" / "regions.npz")
    assert regions["features"].shape[1] == 2048 and 10 <= len(regions["boxes"]) <= 12


def save_untrained_run(
    folder: Path,
    config: Path,
    *,
    detector: dict | None = None,
    encoder: dict | None = None,
    task: dict | None = None,
    **data: object,
) -> Path:
    """A model in the form that training saves it."""
    settings = RunConfig(
        output=str(folder / "run"),
        detector=DetectorSettings(config=str(config), overrides=detector or {}),
        encoder=EncoderSettings(
            name="vl_bert",
            config={
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "visual_size": 32,
                **(encoder or {}),
            },
        ),
        task=TaskSettings(name="refcoco", config=task or {}),
        data=DataSettings(name="refcoco", root="data", resize=ResizeSettings(short_edge=[64], long_edge=120), **data),
    )
    build_vocabulary(["the red one"], folder / "vocab.txt")
    tokenizer = load_tokenizer(folder / "vocab.txt")
    save_model(folder / "run" / "model", settings, build_model(settings, vocab_size=len(tokenizer)), tokenizer)
    return folder / "run"


def test_phrase_with_a_saved_model(tool: types.ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Whatever box an untrained model finds lies in the image."""
    save_untrained_run(tmp_path, config)
    image, (height, width) = write_image(tmp_path, "rotated")
    out = tmp_path / "out"
    assert tool.main([str(image), "--output", str(out), "--run", str(tmp_path / "run"), "--text", "The red one"]) == 0
    assert "the boxes that it finds itself are random" in capsys.readouterr().out  # the run was never trained
    answer = json.loads((out / "phrase.json").read_text())
    x1, y1, x2, y2 = answer["box"]
    assert 0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height
    assert answer["box"] in answer["boxes"] and len(answer["boxes"]) == len(answer["scores"])
    assert 0 < answer["score"] < 1
    assert (out / "phrase.png").is_file() and len(np.load(out / "regions.npz")["boxes"]) >= 10
    assert_error(
        tool, [str(image), "--output", str(out), "--run", str(tmp_path / "run"), "--text", " "], "empty", capsys
    )


def test_phrase_without_any_region(tool: types.ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run = save_untrained_run(
        tmp_path,
        config,
        encoder={"uses_whole_image": False, "image_feature_on_words": False},
        task={"no_region_is_miss": True},
        detector={"MODEL": {"ROI_HEADS": {"SCORE_THRESH_TEST": 1.0}}},
    )
    image, _ = write_image(tmp_path, "rgb")
    out = tmp_path / "out"
    assert tool.main([str(image), "--output", str(out), "--run", str(run), "--text", "the red one"]) == 0
    assert 'Nothing in this image fits "the red one"' in capsys.readouterr().out
    answer = json.loads((out / "phrase.json").read_text())
    assert (answer["box"], answer["score"], answer["boxes"], answer["scores"]) == (None, 0, [], [])
    assert (out / "phrase.png").is_file()


def test_phrase_is_cut_as_in_training(config: Path, tmp_path: Path):
    run = save_untrained_run(tmp_path, config, max_text_length=4)
    image, _ = write_image(tmp_path, "rgb")
    long, short, other = (
        e2e_vl.load(run).ask(image, text).record for text in ("the red one one", "the red", "the one")
    )
    assert long["box"] == short["box"] and long["candidate_boxes"] == short["candidate_boxes"]
    assert long["candidate_scores"] == short["candidate_scores"]
    assert long["candidate_scores"] != other["candidate_scores"]

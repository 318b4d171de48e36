"""`e2e-vl extract` of one image (tools/extract_demo.py) and of many."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

import e2e_vl
from detector.checkpoint import save_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from e2e_vl.cli import extract
from e2e_vl.data.features import RegionFeatures, open_features
from tests.cli.calls import refused
from tests.conftest import ROOT
from tests.detector.published import save_detector
from tests.run.runs import predictions_of

pytestmark = pytest.mark.usefixtures("on_cpu")
NUMBER = 80


def pixels(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    base = ROOT / "configs" / "detector" / "tiny.yaml"
    path.write_text(f"_BASE_: {base}\nINPUT: {{MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 160}}\n")
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.fromarray(pixels(70, 110, 3)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.mark.parametrize("kind", ["16 bit", "rotated", "thin"])
def test_any_image(config: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture):
    (height, width), exif = (2, 900) if kind == "thin" else (70, 110), Image.Exif()
    content = pixels(height, width, dtype=np.uint16) if kind == "16 bit" else pixels(height, width, 3)
    if kind == "rotated":
        exif[0x0112] = 6
        height, width = width, height
    Image.fromarray(content).save(tmp_path / "image.png", exif=exif)
    words = [str(tmp_path / "image.png"), "--output", str(tmp_path / "out"), "--config", str(config)]
    assert extract.one_image(words) == 0
    assert "random" in capsys.readouterr().out
    regions = np.load(tmp_path / "out" / "regions.npz")
    boxes, scores, classes, features = (regions[name] for name in ("boxes", "scores", "classes", "features"))
    number = len(boxes)
    assert (1 if kind == "thin" else 10) <= number <= 36
    assert scores.shape == classes.shape == (number,)
    assert boxes.dtype == scores.dtype == features.dtype == np.float32 and classes.dtype == np.int64
    assert features.shape == (number, 256) and np.isfinite(features).all() and features.any()
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] < boxes[:, 2:]).all()
    assert (boxes[:, 2:] <= [width, height]).all()
    # Random boxes lie everywhere, so they also tell whether the scale was undone (and the right side taken as width).
    assert boxes[:, 2].max() > 0.6 * width and boxes[:, 3].max() > 0.6 * height
    assert (np.diff(scores) <= 0).all() and (classes < 6).all()
    with Image.open(tmp_path / "out" / "regions.png") as picture:
        assert picture.mode == "RGB" and min(picture.size) >= 100 and 480 <= max(picture.size) <= 1400


def test_a_detector_by_its_folder_or_file(config: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = save_detector(FasterRCNN(DetectorConfig.from_yaml(config)).eval(), tmp_path / "saved")
    weights, found = str(folder / "model.safetensors"), []
    for words in (["--detector", str(folder)], ["--detector", weights], ["--weights", weights]):
        given = [] if words[1] == str(folder) else ["--config", str(config)]
        assert extract.one_image([str(image), "--output", str(tmp_path / "out"), *words, *given]) == 0
        found.append(np.load(tmp_path / "out" / "regions.npz")["features"])
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    assert "random" not in capsys.readouterr().out


def test_phrase(trained_run, tmp_path: Path, capsys: pytest.CaptureFixture):
    """The files hold what the Python API answers and draws."""
    record = predictions_of(trained_run.path)[0]
    words = [record["file_name"], "--output", str(tmp_path), "--run", str(trained_run.path)]
    assert extract.one_image([*words, "--text", "the red elephant"]) == 0
    model = e2e_vl.load(trained_run.path)
    with pytest.warns(UserWarning, match="Not in the vocabulary of .*: elephant;"):
        expected = model.ask(record["file_name"], "the red elephant")
    found = json.loads((tmp_path / "phrase.json").read_text("utf-8"))
    assert found["box"] == pytest.approx(expected.box, abs=1e-3) and found["text"] == "the red elephant"
    assert len(found["boxes"]) == len(found["scores"]) == len(expected.prediction.candidate_boxes)
    printed = capsys.readouterr()
    assert f'"the red elephant" is at {expected.text} (score' in printed.out and printed.err == ""
    assert ": elephant; the model does not know" in printed.out
    pictures = {"phrase.png": expected.draw(), "regions.png": model.regions(record["file_name"]).draw()}
    for name, picture in pictures.items():
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(picture))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none.png", "--config", "CONFIG"], "none.png"),
        (["image.png", "--text", "the cat"], "--run"),
        (["image.png", "--run", "no_run", "--text", "the cat"], "no_run"),
        (["image.png", "--config", "no.yaml"], "no.yaml"),
        (["image.png", "--config", "CONFIG", "--weights", "no.bin"], "no.bin"),
        (["image.png", "--config", "CONFIG", "--max-proposals", "0"], "POST_NMS_TOPK_TEST"),
        (["image.png", "--config", "CONFIG", "--min-regions", "5", "--max-regions", "4"], "min_regions"),
        (["image.png", "--config", "CONFIG", "--min-score", "50"], "from 0 to 1"),
        (["--images", ".", "--num-boxes", "36", "--min-score", "0.5"], "--num-boxes"),
        (["--images", ".", "--rule", "maxnms", "--min-score", "0.5"], "maxnms"),
        (["--images", ".", "--boxes", "boxes.json", "--max-boxes", "5"], "--max-boxes"),
        (["image.png", "--config", "CONFIG", "--class-names", "names.txt"], "6 classes"),
        (["image.png", "--config", "CONFIG", "--attribute-names", "names.txt"], "11 attributes"),
        (["--images", ".", "--config", "CONFIG", "--format", "tsv", "--image-feature"], "image's feature"),
        (["--images", ".", "--config", "CONFIG", "--format", "tsv"], ".tsv"),
        (["--images", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments(config: Path, image: Path, tmp_path: Path, words, part, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("one")
    given = [str(config) if word == "CONFIG" else word for word in words]
    assert part in refused(["extract", *given, "--output", "out"], capsys)
    assert not (tmp_path / "out").exists()


def test_each_of_several_images_gets_its_folder(config: Path, image: Path, tmp_path: Path, capsys):
    for name in ("10.jpg", "sub/1.jpg", "2.jpg"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, tmp_path / "photos" / name)
    words = ["--config", str(config), "--output", str(tmp_path / "out")]
    for images, count in ((f"{tmp_path}/photos/*.jpg", 2), (str(tmp_path / "photos"), 3)):
        assert extract.one_image([images, *words]) == 0
        assert len(list((tmp_path / "out").glob("*/regions.png"))) == count
    assert (tmp_path / "out" / "0003" / "regions.npz").is_file()
    assert extract.one_image([str(tmp_path / "no" / "*.jpg"), *words]) == 2
    assert "no file fits this pattern" in capsys.readouterr().err


def test_default_detector_from_any_folder(image: Path, tmp_path: Path, monkeypatch, capsys):
    """The command without options: ResNet-101 with 2048 features, whatever the current directory is."""
    monkeypatch.chdir(tmp_path)
    assert extract.one_image(["image.png", "--output", "out", "--max-proposals", "20", "--max-regions", "12"]) == 0
    assert capsys.readouterr().out.count("random") == 1
    regions = np.load(tmp_path / "out" / "regions.npz")
    assert regions["features"].shape[1] == 2048 and 10 <= len(regions["boxes"]) <= 12


# Many images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(NUMBER):
        pixels = generator.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder


@pytest.fixture
def words(images: Path, config: Path) -> list[str]:
    rule = "--rule maxnms --num-boxes 4 --max-proposals 10 --workers 0 --batch-size 4"
    return ["--images", str(images), "--config", str(config), "--format", "tsv", *rule.split()]


def test_two_processes_that_are_killed_and_one_that_goes_on(words, tmp_path, capsys):
    """Every image is there once, in the order of the list, with the features of an undisturbed extraction."""
    output, parts = tmp_path / "out.tsv", tmp_path / "out.tsv.parts"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "--"]
    process = psutil.Popen(
        [sys.executable, *launch, "e2e_vl", "extract", *words, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    deadline, shares = time.monotonic() + 240, set()
    while len(shares) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        shares = {int(path.stem) % 2 for path in parts.glob("*.npz")}  # every second image is a process's
    workers = process.children(recursive=True) if process.poll() is None else []
    for one in (process, *workers):
        one.kill()
    psutil.wait_procs(workers)
    printed = process.communicate()[0].decode()
    done = [path.stem for path in parts.glob("*.npz")]
    assert len(shares) == 2 and len(done) < NUMBER, printed[-3000:]

    assert extract.many_images([*words, "--output", str(output)]) == 0
    assert f"{NUMBER - len(done)} images extracted, {len(done)} already existed" in capsys.readouterr().out
    assert not parts.exists()
    assert extract.many_images([*words, "--output", str(tmp_path / "undisturbed.tsv")]) == 0
    found, expected = open_features(output), open_features(tmp_path / "undisturbed.tsv")
    assert found.stamp == expected.stamp
    assert found.ids == expected.ids == [f"{number:03}" for number in range(NUMBER)]
    for name in found.ids:
        assert len(found[name]) == 4
        assert_same_regions(found[name], expected[name])


def assert_same_regions(one: RegionFeatures, other: RegionFeatures) -> None:
    assert np.allclose(one.boxes, other.boxes, atol=1e-3)
    assert np.allclose(one.features, other.features, atol=1e-4)


def test_images_that_cannot_be_read_end_in_exit_code_1(words, tmp_path, images, capsys):
    listed = tmp_path / "list.txt"
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    listed.write_text(f"{images}/003.png\n{tmp_path}/bad.jpg\n{tmp_path}/missing.png\n{images}/001.png\n")
    words[1] = str(listed)
    assert extract.many_images([*words, "--output", str(tmp_path / "o.tsv")]) == 1
    printed = capsys.readouterr()
    assert "2 images extracted" in printed.out
    assert "2 images could not be extracted" in printed.err
    assert f"bad: Image {tmp_path}/bad.jpg" in printed.err and "missing.png" in printed.err
    assert open_features(tmp_path / "o.tsv").ids == ["003", "001"]
    assert json.loads((tmp_path / "o.tsv.json").read_text())["stamp"]["box_rule"]["rule"] == "maxnms"


def test_given_boxes_with_the_detector_of_a_run(images, trained_run, tmp_path):
    listed = [{"id": 7, "file_name": "003.png"}, {"id": 4, "file_name": "001.png"}]
    (tmp_path / "images.json").write_text(json.dumps({"images": listed}))
    (tmp_path / "boxes.json").write_text(json.dumps([{"image_id": 7, "bbox": [5, 6, 20, 10]}]))
    words = f"--images {tmp_path}/images.json --root {images} --boxes {tmp_path}/boxes.json --run {trained_run.path}"
    words += f" --output {tmp_path}/features --workers 0 --image-feature"
    assert extract.many_images(words.split()) == 0
    store = open_features(tmp_path / "features")
    assert store.ids == ["4", "7"] and len(store["4"]) == 0
    record, stamp = store["7"], store.stamp
    assert record.boxes.tolist() == [[5, 6, 25, 16]] and record.predictions.attributes is None
    assert record.image_feature.shape == record.features.shape[1:]
    assert stamp["features_of"] == "given boxes" and len(stamp["box_rule"]["boxes_sha256"]) == 64
    assert stamp["weights"]["file"] == "model.safetensors"


def test_backends_and_precisions(words, tmp_path, images):
    """The same boxes and features in either backend; nearly the same in bfloat16."""
    torch.manual_seed(0)
    save_weights(FasterRCNN(DetectorConfig.from_yaml(words[3])).state_dict(), tmp_path / "w.pth")
    (tmp_path / "list.txt").write_text(f"{images}/003.png\n{images}/001.png\n")
    words[1] = str(tmp_path / "list.txt")

    def features(*more: str):
        output = tmp_path / f"out{''.join(more)}.tsv"
        command = [*words, "--weights", str(tmp_path / "w.pth"), "--output", str(output), *more]
        assert extract.many_images(command) == 0
        AcceleratorState._reset_state()  # one process has one precision
        return open_features(output)

    expected, rough = features(), features("--precision", "bf16")
    if importlib.util.find_spec("detectron2") is not None:
        found = features("--backend", "detectron2")
        assert found.stamp["backend"] == "detectron2"
        for name in expected.ids:
            assert_same_regions(found[name], expected[name])
    assert (expected.stamp["precision"], rough.stamp["precision"]) == ("no", "bf16")
    means = [[store[name].features.mean(0) for name in expected.ids] for store in (expected, rough)]
    size = np.abs(np.concatenate([expected[name].features for name in expected.ids])).max()
    assert 0 < np.abs(np.subtract(*means)).max() < 0.2 * size


@pytest.mark.parametrize(
    ("words", "module", "passed"),
    [
        (["x.jpg", "--output", "o"], "one_image", ["x.jpg", "--output", "o"]),
        ([".", "--output", "o"], "many_images", ["--images", ".", "--output", "o"]),
        (["--output", "o", "--images", "x.txt"], "many_images", ["--output", "o", "--images", "x.txt"]),
    ],
)
def test_one_image_is_told_from_many(words, module, passed, monkeypatch):
    calls = []
    for name in ("one_image", "many_images"):
        monkeypatch.setattr(extract, name, lambda words, prog, name=name: calls.append((name, words)))
    extract.main(words, "e2e-vl extract")
    assert calls == [(module, passed)]

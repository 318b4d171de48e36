"""The command: several processes, a kill, exit codes, options that contradict each other."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image

from detector.checkpoint import save_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from e2e_vl.cli import extract_features
from e2e_vl.config import load_config
from e2e_vl.data.features import open_features
from e2e_vl.run.train import train

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "extract_features.py"
NUMBER = 80


@pytest.fixture(scope="module")
def tool():
    return extract_features


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(NUMBER):
        pixels = generator.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder


@pytest.fixture
def words(images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    config = tmp_path_factory.mktemp("config") / "small.yaml"
    base = ROOT / "configs" / "detector" / "tiny.yaml"
    config.write_text(f"_BASE_: {base}\nINPUT: {{MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 128}}\n")
    rule = "--rule maxnms --num-boxes 4 --max-proposals 10 --workers 0 --batch-size 4"
    return ["--images", str(images), "--config", str(config), "--format", "tsv", *rule.split()]


@pytest.mark.usefixtures("on_cpu")
def test_two_processes_that_are_killed_and_one_that_goes_on(tool, words, tmp_path, capsys):
    """Every image is there once, in the order of the list, with the features of an undisturbed extraction."""
    output = tmp_path / "out.tsv"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--"]
    process = subprocess.Popen(
        [sys.executable, *launch, str(TOOL), *words, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    parts = tmp_path / "out.tsv.parts"
    deadline = time.monotonic() + 240
    shares: Counter[int] = Counter()
    while len(shares) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        shares = Counter(int(path.stem) % 2 for path in parts.glob("*.npz"))  # every second image is a process's
    launcher = psutil.Process(process.pid)
    started = [launcher, *launcher.children(recursive=True)] if process.poll() is None else []
    for one in started:
        one.kill()
    psutil.wait_procs(started[1:])
    printed = process.communicate()[0].decode()
    done = [path.stem for path in parts.glob("*.npz")]
    assert len(shares) == 2 and len(done) < NUMBER, printed[-3000:]

    assert tool.main([*words, "--output", str(output)]) == 0
    said = f"{NUMBER - len(done)} images described, {len(done)} were there before"
    assert said in capsys.readouterr().out
    assert not parts.exists()

    assert tool.main([*words, "--output", str(tmp_path / "undisturbed.tsv")]) == 0
    found, expected = open_features(output), open_features(tmp_path / "undisturbed.tsv")
    assert found.stamp == expected.stamp
    assert found.ids == expected.ids == [f"{number:03}" for number in range(NUMBER)]
    for one, other in ((found[name], expected[name]) for name in found.ids):
        assert len(one) == 4 and np.allclose(one.boxes, other.boxes, atol=1e-3)
        assert np.allclose(one.features, other.features, atol=1e-4)


@pytest.mark.usefixtures("on_cpu")
def test_images_that_cannot_be_read_end_in_exit_code_1(tool, words, tmp_path, images, capsys):
    listed = tmp_path / "list.txt"
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    listed.write_text(f"{images}/003.png\n{tmp_path}/bad.jpg\n{tmp_path}/missing.png\n{images}/001.png\n")
    words[1] = str(listed)
    assert tool.main([*words, "--output", str(tmp_path / "o.tsv")]) == 1
    printed = capsys.readouterr()
    assert "2 images described" in printed.out
    assert "2 images could not be described" in printed.err
    assert f"bad: Image {tmp_path}/bad.jpg" in printed.err and "missing.png" in printed.err
    assert open_features(tmp_path / "o.tsv").ids == ["003", "001"]
    assert json.loads((tmp_path / "o.tsv.json").read_text())["stamp"]["box_rule"]["rule"] == "maxnms"


@pytest.mark.usefixtures("on_cpu")
def test_given_boxes_with_the_detector_of_a_run(tool, images, trained_run, tmp_path):
    listed = {"images": [{"id": 7, "file_name": "003.png"}, {"id": 4, "file_name": "001.png"}]}
    (tmp_path / "images.json").write_text(json.dumps(listed))
    (tmp_path / "boxes.json").write_text(json.dumps([{"image_id": 7, "bbox": [5, 6, 20, 10]}]))
    output = tmp_path / "features"
    words = f"--images {tmp_path}/images.json --root {images} --boxes {tmp_path}/boxes.json --run {trained_run.path}"
    assert tool.main([*words.split(), "--output", str(output), "--workers", "0", "--image-feature"]) == 0
    store = open_features(output)
    assert store.ids == ["4", "7"] and len(store["4"]) == 0
    record = store["7"]
    assert record.boxes.tolist() == [[5, 6, 25, 16]] and record.image_feature.shape == record.features.shape[1:]
    assert record.attributes is None
    assert store.stamp["features_of"] == "given boxes" and len(store.stamp["box_rule"]["boxes_sha256"]) == 64
    assert store.stamp["weights"]["file"] == "model.safetensors"


@pytest.mark.usefixtures("on_cpu")
def test_backends_precisions_and_kinds_of_weights(tool, words, tmp_path, images):
    """The same boxes and features from .pth and .pkl files in either backend; nearly the same in bfloat16."""
    config = DetectorConfig.from_yaml(words[3])
    torch.manual_seed(0)
    tensors = FasterRCNN(config).state_dict()
    save_weights(tensors, tmp_path / "w.pth")
    arrays = {name: value.numpy() for name, value in tensors.items()}
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "Detectron2 Model Zoo"}))
    (tmp_path / "list.txt").write_text(f"{images}/003.png\n{images}/001.png\n")
    words[1] = str(tmp_path / "list.txt")

    def extract(weights: str, *more: str):
        output = tmp_path / f"{weights}{''.join(more)}.tsv"
        assert tool.main([*words, "--weights", str(tmp_path / weights), "--output", str(output), *more]) == 0
        AcceleratorState._reset_state()  # one process has one precision
        return open_features(output)

    expected = extract("w.pth")
    exact, rough = [extract("w.pkl")], extract("w.pth", "--precision", "bf16")
    if importlib.util.find_spec("detectron2") is not None:
        exact.append(extract("w.pkl", "--backend", "detectron2"))
        assert exact[-1].stamp["backend"] == "detectron2"
    for found in exact:
        assert found.ids == expected.ids
        for one, other in ((found[name], expected[name]) for name in found.ids):
            assert np.allclose(one.boxes, other.boxes, atol=1e-3)
            assert np.allclose(one.features, other.features, atol=1e-4)
    assert "precision" not in expected.stamp and rough.stamp["precision"] == "bf16"
    changed = [np.abs(rough[name].features.mean(0) - expected[name].features.mean(0)) for name in expected.ids]
    assert rough.ids == expected.ids
    size = np.abs(np.concatenate([expected[name].features for name in expected.ids])).max()
    assert 0 < np.max(changed) < 0.2 * size


@pytest.mark.usefixtures("on_cpu")
def test_the_tiny_run_on_precomputed_features(tool, trained_run, tmp_path):
    """configs/tiny/precomputed.yaml after the commands that its header gives."""
    data = trained_run.config.data
    instances = Path(data.root) / data.files["instances"]
    words = f"--images {instances} --root {Path(data.root) / data.files['images']} --boxes {instances}"
    more = f"--run {trained_run.path} --image-feature --output {tmp_path / 'features'} --workers 0"
    assert tool.main([*words.split(), *more.split()]) == 0
    own = [
        f"data.root={data.root}",
        f"data.files.features={tmp_path / 'features'}",
        f"detector.config={trained_run.config.detector.config}",
        f"output={tmp_path / 'run'}",
    ]
    config = load_config(ROOT / "configs" / "tiny" / "precomputed.yaml", own)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, synthetic=data.synthetic))
    metrics = train(config)
    assert metrics["val/count_precomputed_boxes"] > 0
    assert not (tmp_path / "run" / "model" / "detector" / "model.safetensors").stat().st_size > 1000
    assert tool.main([*words.split(), "--run", str(tmp_path / "run"), "--output", str(tmp_path / "other")]) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--format", "lxmert"], "add --attributes"),
        (["--min-boxes", "3"], "either --num-boxes or"),
        (["--image-feature"], "no place for the whole image's feature"),
        (["--boxes", "x.json"], "leave out the options that choose boxes"),
        (["--run", "runs/x"], "Give either --run, or --detector"),
        (["--batch-size", "0"], "batch size 0"),
        (["--format", "npz", "--output", str(TOOL)], "is a file"),
        (["--output", "features.txt"], "must end in .tsv"),
        (["--images", "nowhere"], "nowhere"),
    ],
)
def test_options_that_cannot_be(tool, words, tmp_path, more, message, capsys):
    assert tool.main([*words, "--output", str(tmp_path / "o.tsv"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

"""Models in ONNX answer as the trained models do, for images of several sizes, and without torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import e2e_vl
from detector.boxes import nms_per_image
from detector.config import DetectorConfig
from detector.errors import MissingFileError, UserError
from detector.images import resize_pixels
from detector.resize_rule import resize_like_torch
from detector.roi_pooler import RoIPooler
from tests.run.runs import ROOT

SIZES = ((128, 128), (300, 90), (71, 211), (400, 333))  # (width, height) in pixels
TOLERANCE = 1e-4  # of probabilities; of boxes relative to the longer side of the image


def skip_without_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install e2e-vl[onnx]")


@pytest.fixture
def needs_onnx(unchecked_shapes) -> None:
    """Skip without the extra; tensors have symbolic sizes during an export, which the checks would fix."""
    skip_without_onnx()


def scene_of_size(scene, size: tuple[int, int]) -> Image.Image:
    return Image.open(scene.image).convert("RGB").resize(size, Image.Resampling.BICUBIC)


def assert_same_answers(model, folder, scenes, texts) -> None:
    """Compare boxes, names and probabilities of all candidates, and the answer, for each scene in another size."""
    exported = e2e_vl.load_onnx(folder)
    for scene, text, size in zip(scenes, texts, SIZES, strict=True):
        image = scene_of_size(scene, size)
        expected = model.ask(image, text)
        answer = exported.ask(image, text)
        np.testing.assert_allclose(answer.boxes, expected.boxes, rtol=0, atol=TOLERANCE * max(size))
        assert list(answer.box_names) == list(expected.box_names)
        assert answer.score == pytest.approx(expected.score, abs=TOLERANCE)
        if model.network.task.predicts_box:
            probabilities = expected.prediction.candidate_scores
            np.testing.assert_allclose(answer.box_scores, probabilities, rtol=0, atol=TOLERANCE)
            assert (answer.box is None) == (expected.box is None)
            if answer.box is not None:
                np.testing.assert_allclose(answer.box, expected.box, rtol=0, atol=TOLERANCE * max(size))
        else:
            assert answer.answer == expected.text
            assert [name for name, _ in answer.top_answers] == [name for name, _ in expected.top_answers]


@pytest.fixture(scope="module")
def demo_files(tmp_path_factory) -> Path:
    """The files of the demo, written by the command in a process of its own, which checks no shapes."""
    skip_without_onnx()
    folder = tmp_path_factory.mktemp("demo_onnx")
    command = [sys.executable, "-m", "e2e_vl", "export", "--run", "demo", "--output", str(folder), "--format", "onnx"]
    written = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert written.count("written: ") == 2
    return folder


def test_demo_model_answers_as_in_torch(demo_model, needs_onnx, demo_files):
    scenes = demo_model.examples[: len(SIZES)]
    assert_same_answers(demo_model, demo_files, scenes, [scene.texts[0] for scene in scenes])


def test_the_files_are_used_without_torch(demo_model, needs_onnx, demo_files):
    image = str(demo_model.examples[0].image)
    program = (
        "import sys, e2e_vl\n"
        f"answers = e2e_vl.load_onnx({str(demo_files)!r}).ask({image!r}, ['a star', 'a purple thing'])\n"
        "assert len(answers) == 2 and 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("encoder", ["visual_bert", "lxmert"])
def test_other_encoders_answer_as_in_torch(encoder, run_of, demo_model, needs_onnx, tmp_path):
    from e2e_vl.api.onnx_export import export_onnx

    model = e2e_vl.load(run_of("gqa", encoder), "cpu")
    export_onnx(model, tmp_path)
    assert_same_answers(model, tmp_path, demo_model.examples[: len(SIZES)], ["is the star red"] * len(SIZES))


def test_nms_in_a_graph_selects_the_same_boxes():
    from e2e_vl.api.onnx_export import nms_of_one_image

    random = torch.Generator().manual_seed(0)
    corners = torch.rand(300, 2, generator=random) * 80
    boxes = torch.cat((corners, corners + 10 + torch.rand(300, 2, generator=random) * 10), dim=1)
    rows = (boxes, torch.rand(300, generator=random), torch.zeros(300).long())
    for num_groups in (1, 5, 1600):
        group = torch.randint(num_groups, (300,), generator=random)
        options = {"sizes": [(100, 100)], "num_groups": num_groups, "threshold": 0.3, "limit": 120}
        for is_usable in (None, torch.rand(300, generator=random) < 0.7):
            [expected] = nms_per_image(*rows, group, **options, is_usable=is_usable)
            [selected] = nms_of_one_image(*rows, group, **options, is_usable=is_usable)
            assert selected.tolist() == expected.tolist()


def test_pooling_from_every_level_gives_the_maps_of_the_right_one():
    from e2e_vl.api.onnx_export import PoolFromEveryLevel

    config = DetectorConfig.from_yaml(ROOT / "configs" / "detector" / "tiny_fpn.yaml")
    random = torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 4, 256 // stride, 256 // stride, generator=random) for stride in (4, 8, 16, 32)]
    sides = torch.tensor([10.0, 60.0, 120.0, 250.0, 30.0])
    rois = torch.stack((torch.zeros(5), torch.ones(5), torch.ones(5), 1 + sides, 1 + sides), dim=1)
    torch.testing.assert_close(PoolFromEveryLevel(config)(maps, rois), RoIPooler(config)(maps, rois))


def test_the_page_about_onnx(demo_model, needs_onnx, demo_files, tmp_path, monkeypatch, capsys):
    """Its snippets print the same box, once in pixels of the original image, once of the resized one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo_onnx").symlink_to(demo_files)
    shutil.copy(demo_model.examples[0].image, "photo.jpg")
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "onnx.md").read_text("utf-8"), re.DOTALL):
        exec(snippet, {})
    numbers = re.findall(r"\d+\.\d*", capsys.readouterr().out)
    first = np.array(numbers[:4], dtype=float)
    last = np.array(numbers[-5:-1], dtype=float)
    np.testing.assert_allclose(last, 2 * first, rtol=0, atol=0.01)


def test_numpy_resizes_as_torch_does():
    random = np.random.default_rng(0)
    for old, new in (((40, 60), (80, 120)), ((97, 31), (31, 97)), ((200, 150), (50, 149)), ((9, 9), (9, 200))):
        pixels = random.integers(256, size=(*old, 3), dtype=np.uint8)
        assert np.array_equal(resize_like_torch(pixels, new), resize_pixels(pixels, new))


def test_what_cannot_be_exported_or_loaded_is_one_sentence(needs_onnx, tmp_path, pretraining_run):
    from e2e_vl.api.onnx_export import export_onnx

    with pytest.raises(UserError, match="are exported, and not the task pretraining"):
        export_onnx(e2e_vl.load(pretraining_run), tmp_path)
    with pytest.raises(MissingFileError, match=r"no settings\.json"):
        e2e_vl.load_onnx(tmp_path)

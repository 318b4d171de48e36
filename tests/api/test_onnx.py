"""Models in ONNX answer as the trained models do, for images of several sizes, and without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import e2e_vl
from detector.errors import MissingFileError, UserError
from detector.images import resize_pixels
from detector.resize_rule import resize_like_torch
from e2e_vl.cli.export import main
from tests.run.runs import ROOT

SIZES = ((128, 128), (300, 90), (71, 211), (400, 333))  # (width, height) in pixels
TOLERANCE = 1e-4  # of probabilities; of boxes relative to the longer side of the image


@pytest.fixture
def needs_onnx(unchecked_shapes) -> None:
    """Skip without the extra; tensors have symbolic sizes during an export, which the checks would fix."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install e2e-vl[onnx]")


def scene_of_size(scene: e2e_vl.api.results.ExampleScene, size: tuple[int, int]) -> Image.Image:
    return Image.open(scene.image).convert("RGB").resize(size, Image.Resampling.BICUBIC)


def assert_same_answers(model, folder, scenes, texts) -> None:
    """Compare boxes, names and probabilities of all candidates, and the answer, for each scene in another size."""
    exported = e2e_vl.load_onnx(folder)
    numbers = set()
    for scene, text, size in zip(scenes, texts, SIZES, strict=True):
        image = scene_of_size(scene, size)
        expected = model.ask(image, text)
        answer = exported.ask(image, text)
        numbers.add(len(answer.boxes))
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
    assert len(numbers) > 1  # the number of boxes changes from image to image


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_demo_model_answers_as_in_torch(demo_model, needs_onnx, tmp_path, capsys):
    assert main(["--run", "demo", "--output", str(tmp_path), "--format", "onnx"]) == 0
    assert capsys.readouterr().out.count("written: ") == 2
    scenes = demo_model.examples[: len(SIZES)]
    assert_same_answers(demo_model, tmp_path, scenes, [scene.texts[0] for scene in scenes])

    without_torch = (
        "import sys, e2e_vl\n"
        f"answers = e2e_vl.load_onnx({str(tmp_path)!r}).ask({str(scenes[0].image)!r}, ['a star', 'a purple thing'])\n"
        "assert len(answers) == 2 and 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", without_torch], check=True, cwd=ROOT)


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

"""`e2e_vl.load(run)`: questions in Python get the answers of the evaluation, for any form of image."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from PIL import Image

import e2e_vl
from e2e_vl.api import model as trained_model
from e2e_vl.api.model import TrainedModel
from e2e_vl.samples import Question

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def model(trained_run) -> TrainedModel:
    return e2e_vl.load(trained_run.path, device="cpu")


@pytest.fixture(scope="module")
def records(trained_run) -> list[dict]:
    """The evaluation's predictions with the detector's predicted boxes, by text."""
    return json.loads((trained_run.path / "predictions_val_online.json").read_text("utf-8"))


class Passes:
    """Counts the images that go through the detector."""

    def __init__(self, model: TrainedModel, monkeypatch: pytest.MonkeyPatch):
        self.images: list[str] = []
        forward = model.network.detector.forward

        def counted(images, *args, **kwargs):
            self.images += images.names
            return forward(images, *args, **kwargs)

        monkeypatch.setattr(model.network.detector, "forward", counted)


def test_questions_share_the_detector_pass_and_get_the_answers_of_the_evaluation(model, records, monkeypatch):
    passes = Passes(model, monkeypatch)
    images = list(dict.fromkeys(record["file_name"] for record in records))
    assert len(records) > 2 * len(images), "several texts per image, or the test shows nothing"
    answers = model.ask([record["file_name"] for record in records], [record["text"] for record in records])
    assert sorted(passes.images) == sorted(images)
    for answer, record in zip(answers, records, strict=True):
        assert answer.text == record["text"]
        assert answer.box == pytest.approx(record["box"], abs=1e-3)
        assert answer.score == pytest.approx(record["score"], abs=1e-5)


def test_every_form_of_an_image_gives_the_same_answer(model, records):
    path, text = Path(records[0]["file_name"]), records[0]["text"]
    picture = Image.open(path)
    forms = [str(path), path.read_bytes(), picture, np.array(picture.convert("RGB"))]
    for form in forms:
        assert np.array_equal(model.ask(form, text).box, model.ask(path, text).box)


def test_one_image_stands_beside_many_texts_and_the_other_way_round(model, records, monkeypatch):
    image, other = records[0]["file_name"], records[-1]["file_name"]
    passes = Passes(model, monkeypatch)
    texts = ["the red circle", "the star", "the square"]
    assert [answer.text for answer in model.ask(Image.open(image), texts)] == texts
    assert len(passes.images) == 1
    assert len(model.ask([image, other], "the star")) == 2 and model.ask([], "the star") == []
    for images, sentences in ([image], ["a", "b"]), (image, [3]):
        with pytest.raises(ValueError, match="one for each"):
            model.ask(images, sentences)


def test_given_boxes_are_the_candidates(model, records):
    image, given = records[0]["file_name"], [[2.0, 3.0, 40.0, 50.0], [30.0, 20.0, 70.0, 61.0]]
    answer = model.ask(image, "the star", boxes=given)
    assert answer.boxes == pytest.approx(np.array(given), abs=1e-3)
    assert answer.box.tolist() in answer.boxes.tolist()
    width, height = Image.open(image).size
    assert len(model.ask(image, "the star", boxes=[-1, 0, width + 1, height]).boxes) == 1
    with pytest.raises(ValueError, match=f"boxes: box 1 .* outside the image .* of {width} x {height} pixels"):
        model.ask(image, "the star", boxes=[[5, 5, 9, 9], [5, 5, width + 2, 9]])


def test_words_that_the_vocabulary_lacks_are_named(model, records):
    with pytest.warns(UserWarning, match="Not in the vocabulary of .*: elephant;") as said:
        [answer, _] = model.ask(records[0]["file_name"], ["the red elephant 7 ?", "the star"])
    assert answer.unknown_words == ("elephant",)
    assert [one.filename for one in said] == [__file__]


def test_pictures_and_regions(model, records):
    image = records[0]["file_name"]
    answer = model.ask(image, records[0]["text"])
    assert set(answer.box_names) <= set(model.class_names) and answer.prediction.detected_class in answer.box_names
    assert "star" in model.class_names and list(answer.top) == [(answer.answer, answer.score)]
    for result in (answer, model.regions(image)):
        assert Image.open(io.BytesIO(result._repr_png_())).size == result.draw().size


def saved_records(run: Path) -> list[dict]:
    return json.loads((run / "predictions_val_gt.json").read_text("utf-8"))


def test_the_regions_of_an_answer_in_words(vqa_run):
    model, record = e2e_vl.load(vqa_run), saved_records(vqa_run)[0]
    answer = model.ask(record["file_name"], record["text"])
    assert answer.box is None and len(answer.top) >= 3 and answer.top[0] == (answer.answer, answer.score)
    assert len(answer.boxes) == len(answer.attention) == len(answer.box_names) == len(answer.box_images)
    assert min(answer.draw().size) > 100 and min(answer.draw_candidates().size) > 100


def test_choices_of_vcr_runs(vcr_runs):
    image = saved_records(vcr_runs[0])[0]["file_name"]
    boxes = ["person:5,6,40,50", "person:30,20,70,61"]
    choices = ["[0] is tall", "[1] is small", "no", "yes"]
    model = e2e_vl.load(vcr_runs[0])
    answer = model.ask(image, "Why is [0] there ?", boxes=boxes, choices=choices)
    assert list(answer.box_names) == list(answer.prediction.box_names) and len(answer.box_names) == 2
    assert {"tall", "Why", "yes"} <= set(answer.unknown_words)
    several = model.ask([image, image], "Why is [0] there ?", boxes=boxes, choices=[choices, choices[::-1]])
    assert [dict(one.top) for one in several] == [pytest.approx(dict(answer.top), abs=1e-5)] * 2
    with pytest.raises(ValueError, match="and the answer"):
        e2e_vl.load(vcr_runs[1]).ask(image, "Why is [0] there ?", boxes=boxes, choices=choices)


def test_masked_regions_and_the_attention_of_a_masked_word(pretraining_run):
    model = e2e_vl.load(pretraining_run)
    image = saved_records(pretraining_run)[0]["file_name"]
    masked = model.hide(image, [[5, 6, 40, 50], [30, 20, 70, 61]], "a [MASK] circle").prediction.masked_regions
    assert [one.box for one in masked] == [pytest.approx([5, 6, 40, 50]), pytest.approx([30, 20, 70, 61])]
    answer, output = model.look(Question(Path(image), "a [MASK] circle"))
    wordpieces, kept = output.batch.texts.input_ids[0].tolist(), output.text_regions.row[0] >= 0
    place = wordpieces.index(model.tokenizer.mask_token_id)
    shares = output.encoded.attentions[-1][0, :, place, len(wordpieces) : len(wordpieces) + len(kept)].mean(dim=0)
    assert place > 0 and answer.attention == pytest.approx(shares[kept].numpy())


def test_an_answer_does_not_depend_on_the_images_that_are_asked_about_beside_it(model, records):
    """An image that is padded to the size of another one has other edges for a detector."""
    photo = Image.open(records[0]["file_name"]).convert("RGB")
    wide, tall = photo.resize((2 * photo.width, photo.height)), photo.resize((photo.width, 2 * photo.height))
    asked = [photo, wide, photo.rotate(180), tall, photo]
    for one, other in zip(model.ask(asked, "the star"), (model.ask(image, "the star") for image in asked), strict=True):
        assert one.boxes.shape == other.boxes.shape
        assert one.boxes == pytest.approx(other.boxes, abs=1e-3) and one.box == pytest.approx(other.box, abs=1e-3)
        assert one.score == pytest.approx(other.score, abs=1e-4)


def test_threads_get_the_same_answers(model, records):
    questions = [(record["file_name"], record["text"]) for record in records[:8]]
    alone = [model.ask(*question).box for question in questions]
    with ThreadPoolExecutor(4) as pool:
        together = [answer.box for answer in pool.map(lambda question: model.ask(*question), questions)]
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_saved_and_loaded_again(model, records, tmp_path):
    model.save_pretrained(tmp_path / "shared")
    texts = [path for path in (tmp_path / "shared").rglob("*") if path.suffix in (".yaml", ".json", ".md", ".txt")]
    assert len(texts) > 5 and not [path for path in texts if str(model.source.parents[1]) in path.read_text("utf-8")]
    card = (tmp_path / "shared" / "README.md").read_text("utf-8")
    assert "| val/accuracy_predicted_boxes | " in card and "license" not in card
    text, image = records[0]["text"], records[0]["file_name"]
    for again in (TrainedModel.from_pretrained(tmp_path / "shared"), e2e_vl.load(tmp_path / "shared")):
        assert np.array_equal(again.ask(image, text).box, model.ask(image, text).box)


def test_nothing_is_read_again_after_loading(pretraining_run, tmp_path):
    shutil.copytree(pretraining_run / "model", tmp_path / "model")
    model = e2e_vl.load(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    image = saved_records(pretraining_run)[0]["file_name"]
    with pytest.warns(UserWarning, match="its boxes are random") as said:
        model.ask(image, "a [MASK] circle")
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.ask(image, "a [MASK] circle")  # said once


def test_only_the_download_of_a_hub_model_is_caught(trained_run, tmp_path, monkeypatch):
    folder = tmp_path / "downloaded"
    shutil.copytree(trained_run.path / "model", folder)
    monkeypatch.setattr(trained_model, "snapshot_download", lambda name: str(folder))
    assert e2e_vl.load("someone/model").source == folder
    (folder / "config.yaml").write_text("nonsense: 1\n")
    with pytest.raises(ValueError, match="there is no setting 'nonsense'"):
        e2e_vl.load("someone/model")


def test_what_cannot_be_read_is_named(model, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no_such_run/here"):
        e2e_vl.load("no_such_run/here")
    with pytest.raises(ValueError, match="the bytes given"):
        model.ask(b"no image", "the star")


def test_auto_classes_know_the_encoders_after_they_are_registered(trained_run):
    folder = str(trained_run.path / "model" / "encoder")
    code = "import e2e_vl; from transformers import AutoModel; e2e_vl.register_encoders(); "
    code += f"print(type(AutoModel.from_pretrained({folder!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "VLBertModel"

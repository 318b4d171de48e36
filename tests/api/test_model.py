"""`e2e_vl.load(run)`: questions in Python get the answers of the evaluation, for any form of image."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import msgspec
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

import e2e_vl
from detector import checkpoint
from detector.config import DetectorConfig
from detector.errors import UserError
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from detector.zoo import find_published_weights
from e2e_vl.api import model as trained_model
from e2e_vl.api.model import (
    Answer,
    TrainedDetector,
    TrainedModel,
    box_marks,
)
from e2e_vl.data.user_inputs import to_image_file
from e2e_vl.drawing import PALETTE
from e2e_vl.predictions import GroundedPhrase, Prediction
from e2e_vl.samples import Question
from tests.conftest import ROOT
from tests.detector.published import save_detector
from tests.run.runs import predictions_of

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def model(trained_run) -> TrainedModel:
    return e2e_vl.load(trained_run.path, device="cpu")


@pytest.fixture(scope="module")
def records(trained_run) -> list[dict]:
    """The evaluation's predictions with the detector's predicted boxes, by text."""
    return predictions_of(trained_run.path, "val_online")


@pytest.fixture
def passes(model, monkeypatch) -> list[str]:
    """The names of the images that go through the detector."""
    names, forward = [], model.network.detector.forward

    def counted(images, *args, **kwargs):
        names.extend(images.names)
        return forward(images, *args, **kwargs)

    monkeypatch.setattr(model.network.detector, "forward", counted)
    return names


def test_questions_share_the_detector_pass_and_get_the_answers_of_the_evaluation(model, records, passes):
    images = list(dict.fromkeys(record["file_name"] for record in records))
    assert len(records) > 2 * len(images), "several texts per image, or the test shows nothing"
    answers = model.ask([record["file_name"] for record in records], [record["text"] for record in records])
    assert sorted(passes) == sorted(images)
    for answer, record in zip(answers, records, strict=True):
        assert answer.question == record["text"]
        assert answer.box == pytest.approx(record["box"], abs=1e-3)
        assert answer.score == pytest.approx(record["score"], abs=1e-5)
        assert list(answer.top_answers) == [(answer.text, answer.score)]
        assert answer.prediction.detected_class in answer.box_names and set(answer.box_names) <= set(model.class_names)


def test_every_form_of_an_image_gives_the_same_answer(model, records):
    path, text = Path(records[0]["file_name"]), records[0]["text"]
    picture = Image.open(path)
    pixels = np.array(picture.convert("RGB"))
    for form in (str(path), path.read_bytes(), picture, pixels, torch.tensor(pixels).permute(2, 0, 1) / 255):
        assert np.array_equal(model(form, text).box, model.ask(path, text).box)


def test_one_image_stands_beside_many_texts_and_the_other_way_round(model, records, passes):
    image, other = records[0]["file_name"], records[-1]["file_name"]
    texts = ["the red circle", "the star", "the square"]
    assert [answer.question for answer in model.ask(Image.open(image), texts)] == texts
    assert len(passes) == 1
    model.ask([Path(image), os.path.relpath(image)], "the star")
    assert len(passes) == 2, "one file, written in two ways"
    assert len(model.ask([image, other], "the star")) == 2 and model.ask([], "the star") == []
    for images, sentences in ([image], ["a", "b"]), (image, [3]):
        with pytest.raises(ValueError, match="one for each"):
            model.ask(images, sentences)


def test_given_boxes_are_the_candidates(model, records):
    image, given = records[0]["file_name"], [[2.0, 3.0, 40.0, 50.0], [30.0, 20.0, 70.0, 61.0]]
    answer = model.ask(image, "the star", boxes=given)
    assert answer.boxes == pytest.approx(np.array(given), abs=1e-3) and answer.box.tolist() in answer.boxes.tolist()
    width, height = Image.open(image).size
    with pytest.raises(ValueError, match=f"boxes: box 1 .* outside the image .* of {width} x {height} pixels"):
        model.ask(image, "the star", boxes=[[5, 5, 9, 9], [5, 5, width + 2, 9]])


def test_boxes_of_an_annotation_file_are_the_candidates(demo_model, tmp_path):
    """In COCO's format, as one has them of real photos."""
    scene = demo_model.examples[0]
    width, height = Image.open(scene.image).size
    corners = scene.boxes[:3]
    annotations = []
    for number, (x1, y1, x2, y2) in enumerate(corners):
        box = [x1, y1, x2 - x1, y2 - y1]
        annotations.append({"id": number, "image_id": 17, "category_id": 1 + number % 2, "bbox": box})
    instances = {
        "images": [{"id": 17, "file_name": f"val/{scene.image.name}", "width": width, "height": height}],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "wine glass"}, {"id": 2, "name": "dog"}],
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(instances))
    text = scene.texts[2]
    answer = demo_model.ask(scene.image, text, boxes=file)
    np.testing.assert_allclose(answer.boxes, corners, atol=1e-3)
    assert answer.box_names == ["wine glass", "dog", "wine glass"]
    np.testing.assert_allclose(answer.box, corners[2], atol=1e-3)
    [(label, _)] = answer.answer_boxes
    assert label.startswith(f"wine glass {answer.score:.2f}")
    assert np.asarray(answer.draw()).shape == np.asarray(demo_model.ask(scene.image, text).draw()).shape
    instances["images"][0]["width"] *= 2  # annotated before the image was resized
    file.write_text(json.dumps(instances))
    with pytest.raises(ValueError, match=f"is {width} x {height} pixels, but {2 * width} x {height} in its annotation"):
        demo_model.ask(scene.image, text, boxes=file)


def test_scores_of_boxes_that_no_part_reads_are_named(model, records):
    image, boxes = records[0]["file_name"], [[2.0, 3.0, 40.0, 50.0], [30.0, 20.0, 70.0, 61.0]]
    with pytest.warns(UserWarning, match="does not read the scores of boxes, so they change nothing"):
        answer = model.ask(image, "the star", boxes=boxes, scores=[0.9, 0.1], names=["star", "circle"])
    assert answer.box_names == ["star", "circle"]
    np.testing.assert_array_equal(answer.box, model.ask(image, "the star", boxes=boxes).box)


def test_words_that_the_vocabulary_lacks_are_named(model, records):
    with pytest.warns(UserWarning, match="Not in the vocabulary of .*: elephant, \N{UNICORN FACE};") as said:
        [answer, plain] = model.ask(records[0]["file_name"], ["the red elephant 7 \N{UNICORN FACE} ?", "the star"])
    assert answer.unknown_words == ("elephant", "\N{UNICORN FACE}")
    assert answer.warnings == (str(said[0].message),) and plain.warnings == ()
    assert [one.filename for one in said] == [__file__]


SAID = "The words 'the star' name another region: the 'star' at x 20 to 30, y 20 to 30, not this 'circle'."


def test_an_answer_that_its_own_phrase_contradicts(model, records):
    near = (0.0, 1.0, 10.0, 10.0)
    boxes = np.array([(0, 0, 10, 10), near, (20, 20, 30, 30), (50, 0, 60, 10)])
    prediction = model.ask(records[0]["file_name"], "the star").prediction
    for box, score, names, is_contradiction in (
        (boxes[2], 0.9, "circle star star star", True),
        (boxes[2], 0.4, "circle star star star", False),  # unsure: it fits several
        (boxes[2], 0.9, "circle circle circle star", False),  # one of several circles
        (near, 0.9, "circle star star star", False),  # the same region
    ):
        grounded = (phrase(score, tuple(box), "the star"),)
        made = msgspec.structs.replace(prediction, box=(0.0, 0.0, 10.0, 10.0), grounded=grounded)
        found = [*model._contradictions(made, boxes, names.split())]
        assert (found == [SAID]) == is_contradiction and (found == []) == (not is_contradiction)


def test_the_best_answers(model, records, vqa_run):
    image = records[0]["file_name"]
    best = model.ask(image, "the star", top_k=3)
    assert best.top_boxes.shape == (3, 4) and len(best.top_answers) == 3
    assert np.array_equal(best.top_boxes[0], best.box) and best.top_answers[0] == (best.text, best.score)
    scores = [score for _, score in best.top_answers]
    assert scores == sorted(scores, reverse=True)
    questions = e2e_vl.load(vqa_run)
    assert [len(questions.ask(image, "what is it ?", top_k=k).top_answers) for k in (1, 6)] == [1, 6]


def test_the_best_answers_from_a_score_on(model, records, vqa_run):
    image = records[0]["file_name"]
    every = model.ask(image, "the star", top_k=1000)
    middle = every.top_answers[2][1]
    best = model.ask(image, "the star", min_score=middle)
    assert list(best.top_answers) == [answer for answer in every.top_answers if answer[1] >= middle]
    assert np.array_equal(best.top_boxes, every.top_boxes[: len(best.top_answers)]) and len(best.top_boxes) >= 3
    assert len(model.ask(image, "the star", top_k=2, min_score=middle).top_boxes) == 2
    none = model.ask(image, "the star", min_score=1.0)
    assert len(none.top_answers) == len(none.top_boxes) == 0 and np.array_equal(none.box, every.box)
    questions = e2e_vl.load(vqa_run)
    score = questions.ask(image, "what is it ?").score
    assert len(questions.ask(image, "what is it ?", min_score=score).top_answers) == 1
    for wrong in (-0.1, 30, True, "0.3"):
        with pytest.raises(UserError, match="min_score"):
            model.ask(image, "the star", min_score=wrong)


def test_show_opens_the_picture_of_draw(model, records, monkeypatch):
    shown = []
    monkeypatch.setattr(Image.Image, "show", lambda picture: shown.append(picture.size))
    answer = model.ask(records[0]["file_name"], "the star")
    answer.show()
    regions = model.regions(records[0]["file_name"])
    regions.show()
    assert shown == [answer.draw().size, regions.draw().size]


def test_boxes_are_arrays(model, records):
    answer = model.ask(records[0]["file_name"], records[0]["text"])
    boxes = [
        answer.box,
        *(box for _, box in answer.answer_boxes),
        *(one.box for one in answer.phrases),
        *answer.top_boxes,
    ]
    assert len(boxes) > 1 and all(box.shape == (4,) and box.dtype == np.float32 for box in boxes)


def test_what_is_printed(model, detector, records):
    answer = model.ask(records[0]["file_name"], "the star")
    assert repr(answer) == f"<Answer to 'the star': {answer.text} ({answer.score:.3f})>"
    assert repr(model.regions(records[0]["file_name"])).count("\n") == 0
    lines = dict(line.split(maxsplit=1) for line in repr(model).splitlines())
    assert lines["task"] == "refcoco" and lines["encoder"] == model.config.encoder.name and lines["device"] == "cpu"
    assert "val, predicted boxes: accuracy 0." in repr(model) and "count" not in repr(model)
    assert "6 classes" in lines["detector"] and "6 classes" in repr(detector)


def test_mistakes_get_a_sentence(model, trained_run, records, tmp_path):
    image = records[0]["file_name"]
    with pytest.raises(UserError, match="'the star' is no image; give the image first"):
        model.ask("the star", image)
    with pytest.raises(UserError, match="no images found"):
        model.regions(tmp_path)
    (tmp_path / ".lock").touch()
    for source, message in (
        (tmp_path, "has not ended; continue it with .*--resume"),
        (trained_run.path / "model" / "detector", "e2e_vl.load_detector"),
        (image, "contains no trained model"),
        ("nothing", "nothing does not exist"),
        ("nothing.pth", "nothing.pth does not exist"),
        (None, "must be a path, not NoneType"),
    ):
        with pytest.raises(UserError, match=message):
            e2e_vl.load(source)
    for source, message in (("nothing", "a name in docs/detectors.md"), (None, "not by a NoneType")):
        with pytest.raises(UserError, match=message):
            e2e_vl.load_detector(source)
    with pytest.raises(UserError, match="The file must be a path, not BytesIO"):
        model.ask(image, "the star").save(io.BytesIO())


def test_choices_of_vcr_runs(vcr_runs):
    image = predictions_of(vcr_runs[0])[0]["file_name"]
    boxes = ["person:5,6,40,50", "person:30,20,70,61"]
    choices = ["[0] is tall", "[1] is small", "no", "yes"]
    model = e2e_vl.load(vcr_runs[0])
    answer = model.ask(image, "Why is [0] there ?", boxes=boxes, choices=choices)
    assert list(answer.box_names) == list(answer.prediction.box_names) and len(answer.box_names) == 2
    assert {"tall", "Why", "yes"} <= set(answer.unknown_words)
    several = model.ask([image, image], "Why is [0] there ?", boxes=boxes, choices=[choices, choices[::-1]])
    assert [dict(one.top_answers) for one in several] == [pytest.approx(dict(answer.top_answers), abs=1e-5)] * 2
    with pytest.raises(ValueError, match="and the answer"):
        e2e_vl.load(vcr_runs[1]).ask(image, "Why is [0] there ?", boxes=boxes, choices=choices)


def test_masked_regions_and_the_attention_of_a_masked_word(pretraining_run):
    model = e2e_vl.load(pretraining_run)
    image = predictions_of(pretraining_run)[0]["file_name"]
    boxes = [[5, 6, 40, 50], [30, 20, 70, 61]]
    masked = model.predict_masked(image, boxes, "a [MASK] circle").prediction.masked_regions
    assert [one.box for one in masked] == list(map(pytest.approx, boxes))
    answer, output = model.ask_with_output(Question(Path(image), "a [MASK] circle"))
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
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_saved_and_loaded_again(model, records, tmp_path):
    model.save_pretrained(tmp_path / "shared")
    texts = [path for path in (tmp_path / "shared").rglob("*") if path.suffix in (".yaml", ".json", ".md", ".txt")]
    assert len(texts) > 5 and not [path for path in texts if str(model.source.parents[1]) in path.read_text("utf-8")]
    card = (tmp_path / "shared" / "README.md").read_text("utf-8")
    assert "| val/accuracy_predicted_boxes | " in card and "license" not in card
    results = ModelCard(card).data.eval_results
    accuracies = [result for result in results if result.metric_name == "accuracy, predicted boxes"]
    metrics = json.loads((tmp_path / "shared" / "metrics.json").read_text("utf-8"))
    [accuracy] = accuracies
    assert accuracy.metric_value == round(metrics["val/accuracy_predicted_boxes"], 4)
    assert accuracy.dataset_name == "refcoco, synthetic scenes" and accuracy.dataset_split == "val"
    assert accuracy.task_type == "referring-expression-comprehension"
    text, image = records[0]["text"], records[0]["file_name"]
    expected = model.ask(image, text)
    for again in (TrainedModel.from_pretrained(tmp_path / "shared"), e2e_vl.load(tmp_path / "shared")):
        answer = again.ask(image, text)
        assert np.array_equal(answer.box, expected.box) and answer.is_unsure == expected.is_unsure


def test_nothing_is_read_again_after_loading(pretraining_run, tmp_path):
    shutil.copytree(pretraining_run / "model", tmp_path / "model")
    model = e2e_vl.load(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    image = predictions_of(pretraining_run)[0]["file_name"]
    with pytest.warns(UserWarning, match="its predicted boxes are random") as said:
        answer = model.ask(image, "a [MASK] circle")
    assert said[0].filename == __file__ and answer.warnings[0] == model.regions(image).warning == model.boxes_warning
    assert model.ask(image, "a [MASK] circle", boxes=[2, 3, 40, 50]).warnings == answer.warnings[1:]
    below = dataclasses.replace(answer, warnings=()).draw().height
    assert answer.draw().height > below, "the warning stands above the picture"


def test_only_the_download_of_a_hub_model_is_caught(trained_run, tmp_path, monkeypatch):
    folder = tmp_path / "downloaded"
    shutil.copytree(trained_run.path / "model", folder)
    monkeypatch.setattr(trained_model, "snapshot_download", lambda name: str(folder))
    assert e2e_vl.load("someone/model").source == folder
    (folder / "config.yaml").write_text("nonsense: 1\n")
    with pytest.raises(ValueError, match="there is no setting 'nonsense'"):
        e2e_vl.load("someone/model")
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no_such_run/here"):
        e2e_vl.load("no_such_run/here")


def test_auto_classes_know_the_encoders_after_they_are_registered(trained_run):
    folder = str(trained_run.path / "model" / "encoder")
    code = "import e2e_vl; from transformers import AutoModel; e2e_vl.register_encoders(); "
    code += f"print(type(AutoModel.from_pretrained({folder!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "VLBertModel"


# Pictures of answers: the answer's box, and what the phrases name.


SIZE = (600, 800)  # height and width: the picture is as large, below its title
BOX = [20.0, 100.0, 120.0, 200.0]
LANDMARK = [300.0, 200.0, 500.0, 400.0]


def phrase(score: float, box: list[float] | None = None, text: str = "it") -> GroundedPhrase:
    return GroundedPhrase(text, (0, len(text)), box, score)


@pytest.fixture
def answer(model, records) -> Callable[..., Answer]:
    """`answer(phrase, ...)`: an answer with these phrases about a grey image, with the box `BOX`."""
    asked = model.ask(records[0]["file_name"], "the star")
    grey = to_image_file(Image.new("RGB", SIZE[::-1], (128, 128, 128)))

    def make(*phrases: GroundedPhrase, boxes: Sequence = (("circle 0.90", BOX),)) -> Answer:
        grounded = Prediction(grounded=phrases)
        return dataclasses.replace(asked, prediction=grounded, images=(grey,), answer_boxes=list(boxes))

    return make


def shown(drawn: Answer) -> list[GroundedPhrase]:
    return [msgspec.structs.replace(one, box=one.box.tolist()) for one in drawn.shown_phrases()]


def coloured(drawn: Answer, colour: int) -> np.ndarray:
    """Which pixels of the image in the picture, without its title, have a colour of `PALETTE`."""
    pixels = np.array(drawn.draw())[-SIZE[0] :]
    return (pixels == PALETTE[colour]).all(axis=2)


def test_the_answer_and_the_landmark_have_their_colours(answer):
    own, other = phrase(0.95, BOX, "the circle"), phrase(0.8, LANDMARK, "the star")
    drawn = answer(own, other)
    assert shown(drawn) == [other], "the first one names the box of the answer"
    assert Image.open(io.BytesIO(drawn._repr_png_())).size == drawn.draw().size
    assert not any(coloured(drawn, colour).any() for colour in range(2, len(PALETTE)))
    for colour, box in ((0, BOX), (1, LANDMARK)):
        x1, y1, x2, y2 = map(int, box)
        found = coloured(drawn, colour)
        outline = 2 * 3 * (x2 - x1 + y2 - y1) - 4 * 3 * 3  # a closed line, 3 pixels wide
        assert found[y1 : y2 + 1, x1 : x2 + 1].sum() == pytest.approx(outline, rel=0.02)
        assert found[y1 - 40 : y1, x1:].sum() > 500, "the label above"
    assert not coloured(answer(own), 1).any()


def test_an_unsure_landmark_is_dashed():
    marks = box_marks(["circle 0.90"], [phrase(0.5, LANDMARK, "the star"), phrase(0.49, LANDMARK, "the star")])
    assert marks["labels"] == ["circle 0.90", "the star 0.50", "the star 0.49, unsure"]
    assert marks["dashed"] == [False, False, True] and marks["colours"] == list(PALETTE[:3])


def test_of_unsure_landmarks_only_the_best_is_shown(answer):
    near, far = [30.0, 30.0, 60.0, 60.0], [400.0, 20.0, 500.0, 90.0]
    first, low, high = phrase(0.45, far), phrase(0.2, LANDMARK), phrase(0.4, near)
    assert shown(answer(first, low, high)) == [high]
    assert shown(answer(first, low, high, phrase(0.6, far))) == [phrase(0.6, far)], "one is clear"
    assert shown(answer(first, phrase(0.9, BOX), high)) == [], "a clear one names the answer's box"
    assert shown(answer(phrase(0.7, far), low)) == [phrase(0.7, far), low]
    assert shown(answer(first)) == answer().shown_phrases() == []
    assert shown(answer(first, phrase(0.0), phrase(0.3, BOX))) == [], "nowhere, or where the answer is"
    assert shown(answer(first, low, boxes=[])) == [low], "also where the answer is in words"


# `e2e_vl.load_detector`: the regions of any image, and the features of given boxes.


@pytest.fixture(scope="module")
def detector(trained_run) -> TrainedDetector:
    return e2e_vl.load_detector(trained_run.path, device="cpu")


@pytest.fixture(scope="module")
def photo(trained_run) -> Path:
    return Path(predictions_of(trained_run.path)[0]["file_name"])


def test_regions_are_the_regions_of_the_model(detector, trained_run, photo):
    limits = {"min_score": 0.0, "min_regions": 3, "max_regions": 5}
    found = detector.regions(photo, **limits)
    same = e2e_vl.load(trained_run.path, device="cpu").regions(photo, **limits)
    assert 3 <= len(found) <= 5 and (np.diff(found.scores) <= 0).all() and found.names == same.names
    np.testing.assert_array_equal(found.boxes, same.boxes)
    np.testing.assert_array_equal(found.features, same.features)


def test_a_stated_score_or_limit_on_regions_wins(demo_model):
    photo = demo_model.examples[7].image
    every = demo_model.regions(photo, min_score=0.0)
    default = demo_model.regions(photo)
    assert len(default) == 10 < len(every) and default.scores[9] < 0.2, "the default is at least 10"
    for score in (0.5, 0.9):
        assert len(demo_model.regions(photo, min_score=score)) == (every.scores >= score).sum() < 10
    assert len(demo_model.regions(photo, max_regions=3)) == 3
    assert len(demo_model.regions(photo, min_regions=12)) == 12
    assert len(demo_model.regions(photo, min_score=0.5, max_regions=2)) == 2
    none = demo_model.regions(photo, min_score=1.0)
    assert len(none) == 0 and none.boxes.shape == (0, 4) and none.features.shape == (0, every.features.shape[1])
    assert repr(none) == f"<0 ImageRegions with {every.features.shape[1]} features>" and none.draw().width > 0
    assert len(demo_model.regions(photo, max_regions=np.int64(3))) == 3
    for wrong in (
        *({"min_regions": 4, "max_regions": 3}, {"min_score": 50}, {"boxes": [1, 2, 30, 40], "min_score": 0.5}),
        *({"min_score": "0.5"}, {"max_regions": 2.5}, {"max_regions": "3"}, {"min_regions": -1}, {"max_regions": 0}),
    ):
        with pytest.raises(UserError, match=r"_regions|min_score"):
            demo_model.regions(photo, **wrong)


def test_regions_of_a_photo_from_a_model_of_drawn_scenes_are_warned_of(demo_model):
    scene, photo = demo_model.examples[0].image, np.zeros((90, 120, 3), dtype=np.uint8)
    detector = e2e_vl.load_detector("demo", device="cpu")
    for regions_of in (demo_model.regions, detector.regions):
        with pytest.warns(UserWarning, match="synthetic scenes of 128 pixels only; this image has 120 x 90") as warned:
            of_scene, of_photo, _ = regions_of([scene, photo, photo])
        assert len(warned) == 1 and warned[0].filename == __file__
        assert of_scene.warning == "" != of_photo.warning


def test_given_boxes_keep_their_order_and_get_features(detector, photo):
    boxes = [[30.0, 20.0, 70.0, 61.0], [2.0, 3.0, 40.0, 50.0]]
    found = detector.regions(photo, boxes=boxes)
    np.testing.assert_allclose(found.boxes, boxes)
    assert found.features.shape == (2, detector.network.feature_dim) and len(found.names) == 2
    swapped = detector.regions(Image.open(photo), boxes=boxes[::-1])
    np.testing.assert_allclose(swapped.features[::-1], found.features, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"boxes: box 0 \[-9, 2, 20, 30\] lies outside the image"):
        detector.regions(photo, boxes=[-9, 2, 20, 30])


def test_a_detector_by_name(photo: Path, tmp_path: Path, monkeypatch):
    """Weights (here random ones), settings, image size and class names: all follow from the name."""
    name = "torchvision/fasterrcnn_mobilenet_v3_large_320_fpn-coco"
    file = tmp_path / find_published_weights(name).file
    monkeypatch.setattr(checkpoint, "download_weights", lambda weights: tmp_path / weights.file)
    torch.save(fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None).state_dict(), file)
    loaded = e2e_vl.load_detector(name, device="cpu")
    assert loaded.source.weights == file
    assert loaded.source.resize == ResizeRule(320, 640, "torchvision")
    assert loaded.class_names[0] == "person" and len(loaded.class_names) == 90
    found = loaded.regions(photo)
    assert 10 <= len(found) <= 36 and found.features.shape == (len(found), 1024)
    assert set(found.names) <= set(loaded.class_names) and found.attributes == []


def test_names_of_classes_and_attributes_from_files(tmp_path: Path, photo: Path):
    """As for bottom-up attention, whose weights come without names."""
    config = DetectorConfig.from_yaml(ROOT / "configs" / "detector" / "tiny.yaml")
    folder = save_detector(FasterRCNN(config), tmp_path / "saved")
    (tmp_path / "objects.txt").write_text("yolk,egg yolk\r\ngoal\r\nbathroom\r\nelm\r\nyew\r\nfir\r\n", newline="")
    (tmp_path / "attributes.txt").write_text("".join(f"{number}th\n" for number in range(11)))

    unnamed = e2e_vl.load_detector(folder).regions(photo)
    assert unnamed.names == [f"class {number}" for number in unnamed.classes] and unnamed.attributes == []
    named = {"class_names": tmp_path / "objects.txt", "attribute_names": tmp_path / "attributes.txt"}
    loaded = e2e_vl.load_detector(folder, **named)
    assert loaded.class_names == ("yolk", "goal", "bathroom", "elm", "yew", "fir")
    found = loaded.regions(photo)
    assert found.names == [loaded.class_names[number] for number in unnamed.classes]
    assert len(found.attributes) == len(found) and all(name.endswith("th") for name in found.attributes)
    assert len(loaded.regions(photo, boxes=[[2, 3, 40, 50]]).attributes) == 1
    assert np.any(np.asarray(found.draw()) != np.asarray(unnamed.draw()))


def test_a_detector_that_learned_no_boxes_says_so(pretraining_run, photo):
    for load in (e2e_vl.load_detector, e2e_vl.load):
        with pytest.warns(UserWarning, match="its predicted boxes are random") as said:
            found = load(pretraining_run).regions(photo)
        assert said[0].filename == __file__ and found.warning in repr(found)
        assert found.draw().height > dataclasses.replace(found, warning="").draw().height


def test_half_precision_keeps_float32_boxes(demo_model):
    scene = demo_model.examples[2]
    before, regions = demo_model.ask(scene.image, scene.texts[0]), demo_model.regions(scene.image)
    try:
        assert demo_model.to(torch.bfloat16) is demo_model and demo_model.to("cpu") is demo_model
        assert "dtype     bfloat16" in repr(demo_model)
        answer, in_half = demo_model.ask(scene.image, scene.texts[0]), demo_model.regions(scene.image)
    finally:
        demo_model.to(dtype="float32")
    assert answer.score != before.score and answer.score == pytest.approx(before.score, abs=0.01)
    assert answer.box == pytest.approx(before.box, abs=0.1) and answer.box.dtype == np.float32
    assert in_half.boxes[0] == pytest.approx(regions.boxes[0], abs=0.1) and (in_half.scores != regions.scores).any()
    assert {p.dtype for p in demo_model.network.parameters()} == {torch.float32}
    detector = e2e_vl.load_detector("demo", device="cpu", dtype="fp16")
    assert detector.to(dtype="bf16").dtype == torch.bfloat16 and detector.device.type == "cpu"
    assert detector.regions(scene.image).boxes == pytest.approx(in_half.boxes, abs=1e-4)


def test_messages_name_the_demo(demo_model):
    answer = demo_model.answer_questions([Question(demo_model.examples[0].image, "the zebra")])[0]
    assert any("vocabulary of demo:" in warning for warning in answer.warnings)
    assert repr(demo_model).startswith("TrainedModel demo\n")


def test_many_images_and_texts_of_any_type(demo_model, tmp_path):
    scene = demo_model.examples[0]
    (tmp_path / "sub").mkdir()
    for name in ("10.png", "2.png", "sub/1.png"):
        shutil.copy(scene.image, tmp_path / name)
    texts = scene.texts[:2]
    expected = [answer.text for answer in demo_model.ask(scene.image, texts)]
    for several in (tuple(texts), iter(texts), np.array(texts)):
        assert [answer.text for answer in demo_model(scene.image, several)] == expected
    pixels = np.asarray(Image.open(scene.image).convert("RGB"))
    for images in ([scene.image, pixels], iter([scene.image, pixels]), np.stack([pixels, pixels])):
        assert [answer.text for answer in demo_model.ask(images, texts)] == expected
    answers = demo_model.ask(tmp_path, texts[0])
    names = ["2.png", "10.png", "sub/1.png"]
    assert [answer.images[0].relative_to(tmp_path).as_posix() for answer in answers] == names
    for images in (tmp_path, f"{tmp_path}/**/*.png", [tmp_path / name for name in names]):
        assert [Path(str(found.image)).name for found in demo_model.regions(images)] == ["2.png", "10.png", "1.png"]
    assert len(demo_model.ask(tmp_path / "sub", texts[0])) == 1 and demo_model.ask([], texts[0]) == []
    for top_k in (0, -1, 2.0, True, "3"):
        with pytest.raises(UserError, match="at least 1"):
            demo_model.ask(scene.image, texts[0], top_k=top_k)
    assert len(demo_model.ask(scene.image, texts[0], top_k=np.int64(3)).top_boxes) == 3
    with pytest.raises(UserError, match="empty tuple"):
        demo_model.ask((), texts[0])
    with pytest.raises(UserError, match=r"'\\udcff star' has characters that are not Unicode"):
        demo_model.ask(scene.image, "\udcff star")
    every = demo_model.regions(scene.image)
    for some in (every[0], list(every)[:1], {"boxes": every[:1].boxes}):
        assert len(demo_model.ask(scene.image, texts[0], boxes=some).boxes) == 1
    with pytest.raises(UserError, match="ask about one image at a time"):
        demo_model.ask([scene.image, scene.image], texts[0], boxes=[every, every])


def test_results_as_json_and_as_files(demo_model, tmp_path):
    scene = demo_model.examples[0]
    answer, found = demo_model.ask(scene.image, scene.texts[0]), demo_model.regions(scene.image)
    content = json.loads(json.dumps(answer.to_dict()))
    assert content["box"] == answer.box.tolist() and content["score"] == answer.score
    assert np.array_equal(content["prediction"]["candidate_boxes"], answer.prediction.candidate_boxes)
    assert content["images"] == [str(scene.image)] and content["phrases"][0]["text"] == answer.phrases[0].text
    assert json.loads(json.dumps(found.to_dict()))["regions"][0] == found[0].to_dict()
    for result, pixels in ((answer, answer.draw()), (found, found.draw())):
        result.save(tmp_path / "new" / "result.json")
        assert json.loads((tmp_path / "new" / "result.json").read_text()) == json.loads(json.dumps(result.to_dict()))
        for name, kind in (("a.png", "PNG"), ("a.JPG", "JPEG")):
            result.save(str(tmp_path / name))
            assert Image.open(tmp_path / name).size == pixels.size and Image.open(tmp_path / name).format == kind
        with pytest.raises(UserError, match=r"a\.txt: a result is saved as"):
            result.save(tmp_path / "a.txt")


def test_regions_are_a_sequence(demo_model):
    found = demo_model.regions(demo_model.examples[0].image)
    regions = list(found)
    assert [region.name for region in regions] == found.names and len(regions) == len(found)
    assert (regions[-1].feature == found.features[-1]).all() and (found[-1].box == found.boxes[-1]).all()
    assert type(regions[0].score) is float and regions[0].attribute == "" and "feature" not in repr(regions[0])
    for rows in (slice(0, 2), [0, 1], np.arange(len(found)) < 2):
        assert found[rows].names == found.names[:2] and (found[rows].features == found.features[:2]).all()
    with pytest.raises(IndexError):
        found[len(found)]

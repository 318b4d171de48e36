"""NLVR2: wording, losses, predictions, pictures of both images."""

from __future__ import annotations

import functools

import cv2
import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.structures import ImageBatch
from e2e_vl.data.batching import random_generator
from e2e_vl.metrics.nlvr2 import NLVR2Prediction
from e2e_vl.samples import CorrectChoice, Question, Sample, SampleImage, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextBatch
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import NLVR2Config
from e2e_vl.tasks.nlvr2 import NLVR2Targets, NLVR2Task
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, spoken


def make_task(**config) -> NLVR2Task:
    torch.manual_seed(0)
    return NLVR2Task(8, NLVR2Config(**{"dropout": 0.0} | config))


def make_batch(*labels: int | None) -> Batch:
    sizes = torch.tensor([[10, 10]] * 2)
    targets = [NLVR2Targets(None if one is None else np.int64(one)) for one in labels]
    texts = TextBatch(*(torch.ones(len(labels), 3, dtype=kind) for kind in (torch.long, torch.long, torch.bool)))
    names = {None: {}, 0: {"label": "False"}, 1: {"label": "True"}}
    return Batch(
        images=ImageBatch(torch.zeros(2, 3, 10, 10), sizes, sizes, ["a.jpg", "b.jpg"]),
        boxes=None,
        texts=texts,
        image_index=torch.tensor([[0, 1]] * len(labels)),
        targets=NLVR2Targets.join(targets),
        records=[{"identifier": f"dev-{n}-0-0", **names[one]} for n, one in enumerate(labels)],
    )


def run(task: NLVR2Task, batch: Batch) -> TaskOutput:
    torch.manual_seed(1)
    states = torch.randn(len(batch), 8)
    return task(batch, None, EncoderOutput(states[:, None], states[:, None], states))


def test_losses():
    output = run(make_task(), make_batch(1, 0))
    assert output.logits.shape == (2, 2)
    torch.testing.assert_close(output.losses["nlvr2"].mean, F.cross_entropy(output.logits, torch.tensor([1, 0])))
    output = run(make_task(loss="sigmoid"), make_batch(1, 0))
    assert not output.logits[:, 0].any()
    expected = F.binary_cross_entropy_with_logits(output.logits[:, 1], torch.tensor([1.0, 0]))
    torch.testing.assert_close(output.losses["nlvr2"].mean, expected)
    assert run(make_task(), make_batch(None)).losses == {}


def test_the_head_fits_the_summary():
    sizes = Sizes(hidden_size=8, vocab_size=9, summary_size=16)
    assert NLVR2Task.build(sizes, NLVR2Config()).head.output.weight.shape == (2, 16)
    wide = NLVR2Task.build(sizes, NLVR2Config(hidden_layer=True))
    assert wide.head.transform["dense"].weight.shape == (16, 16)
    assert make_task().head.transform is None


def test_predictions_and_metrics():
    task, found = make_task(), []
    for batch, logits in ((make_batch(1, 1), [[0.0, 2.0], [1.0, 0.0]]), (make_batch(None), [[0.0, 0.0]])):
        output = ModelOutput(TaskOutput({}, torch.tensor(logits)), None, None, None, batch)
        found += task.predict(batch, output)
    first, second, third = found
    assert (first.prediction, second.prediction, third.prediction) == ("True", "False", "False")
    assert first.true == pytest.approx(0.8808, abs=1e-4) and second.score == pytest.approx(0.7311, abs=1e-4)
    assert (task.correct(first), task.correct(second), task.correct(third)) == (1, 0, None)
    metrics = task.metrics([first, second, third])
    assert metrics == {"count": 3, "accuracy": 0.5, "consistency": 0.5, "accuracy/true": 0.5}
    assert [name for name, _ in task.ranked(second)] == ["False", "True"]
    described = task.describe(msgspec.structs.replace(first, family="both"))
    assert (described.answer, described.truth, described.group) == ("True", "True", "both")


def test_wording_of_a_sentence_about_two_images(tmp_path):
    tokenizer = make_tokenizer(tmp_path, "the left image")
    preprocessor = make_task().preprocessor(TextTokenizer(tokenizer))
    stated = SampleText(0, "The left image", {"identifier": "dev-1-0-0"}, CorrectChoice(1), image_index=(0, 1))
    sample = Sample((SampleImage("l", tmp_path / "l"), SampleImage("r", tmp_path / "r")), (stated,))
    draw = functools.partial(random_generator, 0, 0)
    for flipped in (False, True):
        [text] = preprocessor(sample, [photo(flipped=flipped)] * 2, draw)
        assert spoken(text, tokenizer) == "[CLS] the left image [SEP]"  # the left image stays on the left
        assert text.image_index == (0, 1) and text.targets.label == 1
        assert text.record["file_names"] == ["photo.jpg"] * 2


def test_questions_need_two_images(tmp_path):
    task = make_task()
    sample = task.question(Question(tmp_path / "a", "both", others=(tmp_path / "b",)))
    assert len(sample.images) == 2 and sample.texts[0].image_index == (0, 1) and sample.texts[0].truth is None
    with pytest.raises(ValueError, match="about 2 images, and 1 is given"):
        task.question(Question(tmp_path / "a", "both"))
    with pytest.raises(ValueError, match="takes no choices"):
        task.question(Question(tmp_path / "a", "both", others=(tmp_path / "b",), choices=("x",)))


def test_the_picture_shows_both_images(tmp_path):
    for name, value, shape in (("l", 40, (60, 90)), ("r", 200, (100, 50))):
        cv2.imwrite(str(tmp_path / f"{name}.png"), np.full(shape, value, np.uint8))
    picture = make_task().draw(
        NLVR2Prediction(prediction="True", score=1, true=1, file_names=[str(tmp_path / f"{name}.png") for name in "lr"])
    )
    height, width = picture.shape[:2]
    assert (picture[:, 5] == 40).all() and (picture[:, width - 5] == 200).all()
    left = int((picture[height // 2, :, 0] == 40).sum())
    assert left / height == pytest.approx(1.5, abs=0.02)


def test_logits_decide_where_their_shares_are_equal():
    batch = make_batch(1)
    logits = torch.tensor([[1e-9, 2e-9]])
    assert len(set(logits.softmax(dim=1)[0].tolist())) == 1
    [found] = make_task().predict(batch, ModelOutput(TaskOutput({}, logits), None, None, None, batch))
    assert found.prediction == "True"

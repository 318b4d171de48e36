"""NLVR2: losses, predictions, sentences about two images, and their pictures."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from e2e_vl.data.batching import random_generator
from e2e_vl.samples import CorrectChoice, Question, Sample, SampleImage, SampleText
from e2e_vl.structures import Batch, EncoderOutput, TaskOutput
from e2e_vl.tasks.config import NLVR2Config
from e2e_vl.tasks.nlvr2 import NLVR2Prediction, NLVR2Targets, NLVR2Task, nlvr2_scores, write_submission
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import make_batch, output_of
from tests.tasks.preprocessors import decoded, photo


def make_task(**config) -> NLVR2Task:
    torch.manual_seed(0)
    return NLVR2Task(8, NLVR2Config(**{"dropout": 0.0} | config))


def sentences(*labels: int | None) -> Batch:
    targets = [NLVR2Targets(None if one is None else np.int64(one)) for one in labels]
    words = {None: {}, 0: {"label": "False"}, 1: {"label": "True"}}
    return make_batch(
        [[0, 1]] * len(labels),
        sizes=[[10, 10]] * 2,
        targets=NLVR2Targets.join(targets),
        records=[{"identifier": f"dev-{n}-0-0", **words[one]} for n, one in enumerate(labels)],
    )


def run(task: NLVR2Task, batch: Batch) -> TaskOutput:
    states = torch.randn(len(batch), 8, generator=torch.Generator().manual_seed(1))
    return task(batch, None, EncoderOutput(states[:, None], states[:, None], states))


def test_losses():
    output = run(make_task(), sentences(1, 0))
    assert output.logits.shape == (2, 2)
    torch.testing.assert_close(output.losses["nlvr2"].mean, F.cross_entropy(output.logits, torch.tensor([1, 0])))
    output = run(make_task(loss="sigmoid"), sentences(1, 0))
    assert not output.logits[:, 0].any()
    expected = F.binary_cross_entropy_with_logits(output.logits[:, 1], torch.tensor([1.0, 0]))
    torch.testing.assert_close(output.losses["nlvr2"].mean, expected)
    assert run(make_task(), sentences(None)).losses == {}


def test_predictions_and_metrics():
    task, found = make_task(), []
    scores = [[0.0, 2.0], [1.0, 0.0], [1.0, 0.0]]
    for batch, logits in ((sentences(1, 1, 0), scores), (sentences(None), [[0.0, 0.0]])):
        found += task.predict(output_of(batch, torch.tensor(logits)))
    first, second, _, third = found
    assert (first.prediction, second.prediction, third.prediction) == ("True", "False", "False")
    assert first.true == pytest.approx(0.8808, abs=1e-4) and second.score == pytest.approx(0.7311, abs=1e-4)
    assert (task.correctness(first), task.correctness(second), task.correctness(third)) == (1, 0, None)
    shares = {"accuracy": 2 / 3, "consistency": 2 / 3, "accuracy/true": 0.5, "accuracy/false": 1}
    assert task.metrics(found) == pytest.approx({"count": 4, **shares}) and task.metrics([third]) == {"count": 1}
    assert [name for name, _ in task.ranked(second)] == ["False", "True"]
    described = task.describe(msgspec.structs.replace(first, family="both"))
    assert (described.answer, described.truth, described.group) == ("True", "True", "both")


def test_a_sentence_is_consistent_if_it_is_right_for_all_its_images():
    labels = {"dev-1-0-0": "True", "dev-1-1-0": "False", "dev-1-0-1": "False", "dev-2-0-0": "True"}
    predictions = labels | {"dev-1-1-0": "True"}
    assert nlvr2_scores(labels, predictions) == {"accuracy": 3 / 4, "consistency": 2 / 3}


def test_logits_decide_where_their_shares_are_equal():
    batch, logits = sentences(1), torch.tensor([[1e-9, 2e-9]])
    [found] = make_task().predict(output_of(batch, logits))
    assert found.prediction == "True"


def test_a_sentence_about_two_images(tokenizer, tmp_path):
    preprocessor = make_task().preprocessor(TextTokenizer(tokenizer))
    sentence = SampleText(0, "The left image", {"identifier": "dev-1-0-0"}, CorrectChoice(1), image_index=(0, 1))
    sample = Sample((SampleImage("l", tmp_path / "l"), SampleImage("r", tmp_path / "r")), (sentence,))
    for flipped in (False, True):
        [text] = preprocessor(sample, [photo(flipped=flipped)] * 2, functools.partial(random_generator, 0, 0))
        assert decoded(text, tokenizer) == "[CLS] the left image [SEP]"  # the left image stays on the left
        assert text.image_index == (0, 1) and text.targets.label == 1
        assert text.record["file_names"] == ["photo.jpg"] * 2


def test_a_question_about_two_images(tmp_path):
    sample = make_task().question(Question(tmp_path / "a", "both", others=(tmp_path / "b",)))
    assert len(sample.images) == 2 and sample.texts[0].image_index == (0, 1) and sample.texts[0].truth is None


def test_the_file_of_the_official_script(tmp_path):
    """It has no header; the official script compares the letters without their case."""
    path = tmp_path / "deep" / "nlvr2.csv"
    predictions = []
    for identifier, answer in (("test1-0-1-0", "True"), ("test1-0-1-1", "False")):
        fields = {"identifier": identifier, "prediction": answer, "score": 0.9, "true": 0.9, "file_names": ()}
        predictions.append(NLVR2Prediction(**fields))
    write_submission(path, predictions)
    assert path.read_text(encoding="utf-8") == "test1-0-1-0,True\ntest1-0-1-1,False\n"
    with pytest.raises(UserError, match="the text test1-0-1-0 is listed twice"):
        write_submission(path, predictions[:1] * 2)

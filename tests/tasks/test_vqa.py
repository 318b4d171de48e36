"""VQA: targets, losses, predictions, and initialisation from word embeddings."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from e2e_vl.data.batching import pad_texts
from e2e_vl.encoders.base import read_summary
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.metrics.vqa import VQAPrediction
from e2e_vl.samples import HumanAnswers, SampleText
from e2e_vl.structures import Batch, EncoderOutput, TaskOutput
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.tasks.vqa import VQATask, VQAVocabulary
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import make_batch, output_of
from tests.tasks.preprocessors import photo, preprocess, sample_of, tokens

HIDDEN, LENGTH = 8, 6
ANSWERS = ["yes", "no", "2", "", "<unk>", "yes"]
MASK = torch.tensor([2, 4])
FIRST = ["yes"] * 6 + ["no"] * 3 + ["maybe"]
SECOND = ["Two"] * 9 + ["2"]


def make_task(**config) -> VQATask:
    torch.manual_seed(0)
    return VQATask(HIDDEN, VQAConfig(**{"answers": ANSWERS} | config)).eval()


def targets_of(*answers: list[str] | None, normalised: bool = False) -> AnswerTargets:
    """The targets of questions with these answers; None: they are unknown."""
    possible = VQAVocabulary(ANSWERS, normalised=normalised)
    judged = [None if given is None else possible.judge(HumanAnswers(tuple(given))) for given in answers]
    return AnswerTargets.join(
        [AnswerTargets() if one is None else AnswerTargets(possible.targets_of(one.scores), one.best) for one in judged]
    )


def two_questions(*answers: list[str] | None, targets: AnswerTargets | None = None) -> Batch:
    """Their answers are read at `MASK`."""
    return make_batch(
        [[0]] * 2,
        length=LENGTH,
        summary=MASK,
        targets=targets or targets_of(*answers),
        records=[{"question_id": number, "answers": given} for number, given in enumerate(answers)],
    )


def run(task: VQATask, batch: Batch) -> tuple[TaskOutput, torch.Tensor]:
    states = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    encoded = EncoderOutput(states, states, summary=read_summary(states, None, batch.texts.summary))
    return task(batch, None, encoded), states


def predict(task: VQATask, batch: Batch, logits: torch.Tensor) -> list[VQAPrediction]:
    return task.predict(batch, output_of(batch, logits))


def test_the_summary_decides():
    for config in ({}, {"hidden_layer": False}):
        task = make_task(**config)
        output, states = run(task, two_questions(FIRST, SECOND))
        summary = states[torch.arange(2), MASK]
        torch.testing.assert_close(output.logits, task.head(summary))
        output.losses["vqa"].mean.backward()
        assert (states.grad.abs().sum(dim=-1) > 0).nonzero().tolist() == [[0, 2], [1, 4]]
    torch.testing.assert_close(output.logits, task.head.output(summary))


@pytest.mark.parametrize(
    ("answers", "scores", "best"),
    [
        (FIRST, [1.0, 0.9, 0, 0, 0, 0], 0),  # "maybe" is unknown, and of the two "yes" the first counts
        (SECOND, [0, 0, 0.3, 0, 0, 0], 2),  # "Two" is not "2"
        (["<unk>"] * 9 + ["no"], [0, 0.3, 0, 0, 0, 0], 1),  # "<unk>" never scores
        (["maybe"] * 6 + ["no", "2"] * 2, [0, 0.6, 0.6, 0, 0, 0], 1),
        (["maybe"] * 10, [0] * 6, -1),
    ],
)
def test_soft_targets_and_the_most_frequent_known_answer(answers, scores, best):
    targets = targets_of(answers)
    assert targets.scores[0].tolist() == pytest.approx(scores) and targets.best.item() == best


def test_normalised_answers():
    targets = targets_of(SECOND, ["a", "<unk>", "unk"] * 3, normalised=True)
    assert targets.scores[0].tolist() == [0, 0, 1, 0, 0, 0] and targets.best.tolist() == [2, 3]


def test_the_softmax_loss_leaves_out_what_has_no_known_answer():
    task = make_task(loss="softmax")
    output, _ = run(task, two_questions(["no"] * 5 + ["2"] * 2 + ["yes"] * 3, ["maybe"] * 10))
    loss = output.losses["vqa"]
    torch.testing.assert_close(loss.mean, F.cross_entropy(output.logits[:1], torch.tensor([1])))
    assert loss.count == 1
    output, states = run(task, two_questions(["maybe"] * 10, ["maybe"] * 10))
    output.losses["vqa"].mean.backward()
    assert output.losses["vqa"].mean == 0 and not states.grad.abs().sum()


def test_predictions_and_metrics():
    task, batch = make_task(top_answers=2), two_questions(FIRST, SECOND)
    logits = torch.tensor([[0.0, 2.0, 1.0, 0, 9.0, 0], [0, 0, 3.0, 1.0, 9.0, 0]])
    first, second = predict(task, batch, logits)
    assert (first.answer, second.answer, first.question_id) == ("no", "2", 0)
    assert predict(make_task(unknown_can_win=True), batch, logits)[0].answer == "<unk>"
    assert [answer for answer, _ in first.top_answers] == ["no", "2"]
    assert first.score == pytest.approx(1 / (1 + math.exp(-2)))
    assert [task.correctness(first), task.correctness(second)] == pytest.approx([0.9, 1])
    assert task.metrics([first, second])["accuracy"] == pytest.approx(0.95)
    assert task.correctness(VQAPrediction(answer="no", score=1)) is None
    shares = predict(make_task(loss="softmax"), batch, logits)[0]
    assert shares.score == pytest.approx(float(logits[0].softmax(0)[1])) and len(shares.top_answers) == 5


def test_rows_start_from_word_embeddings(tokenizer):
    embeddings = torch.nn.Embedding(len(tokenizer), HIDDEN)
    encoder = SimpleNamespace(get_input_embeddings=lambda: embeddings)
    task, plain = (make_task(answers=["yes", "hot dog", ""], initialise_from_words=is_on) for is_on in (True, False))
    before = plain.head.output.weight.clone()
    for one in (task, plain):
        one.initialise(tokenizer, encoder, None)
    table, ids, rows = embeddings.weight, tokenizer.convert_tokens_to_ids, task.head.output.weight
    torch.testing.assert_close(rows[0], table[ids("yes")])
    torch.testing.assert_close(rows[1], (table[ids("hot")] + table[ids("dog")]) / 2)
    assert torch.equal(rows[2], before[2]) and torch.equal(plain.head.output.weight, before)  # no wordpiece; not wanted
    assert rows.requires_grad and not task.head.output.bias.any()


def test_questions_without_a_known_answer_are_counted_before_training(caplog):
    make_task().check_data(questions(FIRST, SECOND, None), None)
    assert not caplog.records
    make_task().check_data(questions(FIRST, ["<unk>"], ["purplish"]), None)
    assert "2 of 3 training questions (66.7 %)" in caplog.text
    with pytest.raises(UserError, match=r"Not one of the 2 .* task\.config\.answers"):
        make_task().check_data(questions(["Two"], ["purplish"]), None)
    make_task(normalised_targets=True).check_data(questions(["Two"]), None)


def questions(*answers: list[str] | None) -> SimpleNamespace:
    truths = [None if given is None else HumanAnswers(tuple(given)) for given in answers]
    return SimpleNamespace(truths=lambda: truths)


def test_the_first_of_equal_answers_wins():
    task = make_task(answers=[f"answer {number}" for number in range(40)], top_answers=3)
    logits = torch.zeros(2, 40)
    logits[1, [30, 7, 12]] = 1.0
    found = predict(task, two_questions(None, None, targets=AnswerTargets()), logits)
    top = [[answer for answer, _ in record.top_answers] for record in found]
    assert top == [["answer 0", "answer 1", "answer 2"], ["answer 7", "answer 12", "answer 30"]]


GIVEN = HumanAnswers(("left side",) * 6 + ("left",) * 4)
SIDES = ["<unk>", "left", "right", "left side", "right side"]


def preprocessor(tokenizer):
    return VQATask(8, VQAConfig(answers=SIDES)).preprocessor(TextTokenizer(tokenizer, layout=VLBertModel.layout))


def asked(*words: str):
    return sample_of(*(SampleText(2 * n, text, {"question_id": 5}, GIVEN) for n, text in enumerate(words)))


def test_the_answer_is_read_at_the_token_of_the_encoder(tokenizer):
    first, second = texts = preprocess(preprocessor(tokenizer), asked("red square left", "blue"))
    assert tokens(first, tokenizer) == ["[CLS]", "red", "square", "left", "[SEP]", "[MASK]", "[SEP]"]
    assert first.encoding.token_type_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert pad_texts(texts).summary.tolist() == [5, 3]
    assert (first.record["text_index"], second.record["text_index"]) == (0, 2)
    assert first.record["answers"] == list(GIVEN.answers)


def test_a_mirrored_image_swaps_left_and_right_in_question_and_answers(tokenizer):
    [text] = preprocess(preprocessor(tokenizer), asked("red square left"))
    np.testing.assert_allclose(text.targets.scores, [0, 1, 0, 1, 0])
    assert text.targets.best == 3
    [text] = preprocess(preprocessor(tokenizer), asked("red square left"), photo(flipped=True))
    assert tokens(text, tokenizer)[1:4] == ["red", "square", "right"]
    assert text.record["answers"] == ["right side"] * 6 + ["right"] * 4
    np.testing.assert_allclose(text.targets.scores, [0, 0, 1, 0, 1])
    assert text.targets.best == 4 and text.record["flipped"] is True

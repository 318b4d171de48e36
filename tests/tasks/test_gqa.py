"""GQA: targets, losses, predictions with choices and attention."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from detector.structures import Loss
from e2e_vl.metrics.gqa import GQAPrediction
from e2e_vl.samples import CorrectAnswer, SampleText, ScoredAnswers
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextBatch
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import GQAConfig
from e2e_vl.tasks.gqa import GQATask, attention_to_regions
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.text import TextTokenizer
from tests.regions import regions_of_own_images
from tests.tasks.batches import make_batch, output_of
from tests.tasks.preprocessors import decoded, photo, preprocess, sample_of

ANSWERS = ["yes", "no", "left", "right", "red"]
TYPES = {"structural": "query", "semantic": "attr", "detailed": "color"}


def make_task(**config) -> GQATask:
    torch.manual_seed(0)
    return GQATask(8, GQAConfig(**{"answers": ANSWERS} | config)).eval()


def questions(*answers: str, **record) -> Batch:
    classes = [ANSWERS.index(answer) if answer in ANSWERS else -1 for answer in answers]
    scores = np.array([[float(answer == other) for other in ANSWERS] for answer in answers], dtype=np.float32)
    known = {"text": "Is it?", "types": TYPES, **record}
    return make_batch(
        [[0]] * len(answers),
        targets=AnswerTargets(torch.from_numpy(scores), torch.tensor(classes)),
        records=[{"question_id": str(n), "right_answer": answer, **known} for n, answer in enumerate(answers)],
    )


def run(task: GQATask, batch: Batch) -> TaskOutput:
    states = torch.randn(len(batch), 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return task(batch, None, EncoderOutput(states[:, None], states[:, None], states))


def predict(task: GQATask, batch: Batch, logits: torch.Tensor) -> list[GQAPrediction]:
    return task.predict(batch, output_of(batch, logits))


def test_the_softmax_loss_times_the_number_of_answers():
    """Computed by hand: five equal logits cost log 5, and with one logit of log 4 its answer costs log 2."""
    batch = questions("no", "purple")
    logits = torch.zeros(2, 5)
    logits[1, 0] = math.log(4)  # the first answer; the sum of the exponentials is 8

    def loss_of(**config) -> Loss:
        return make_task(loss="softmax_times_answers", **config)._loss(logits, batch.targets)

    without, first = loss_of(), loss_of(unlisted_is_first=True)
    assert (without.total.item(), without.count.item()) == (pytest.approx(5 * 1.6094379), 1)
    assert (first.total.item(), first.count.item()) == (pytest.approx(5 * (1.6094379 + 0.6931472)), 2)
    [record, _] = predict(make_task(loss="softmax_times_answers"), batch, logits)
    assert record.score == pytest.approx(0.2), "a share among all answers"


def test_the_hidden_layer_may_be_wider_than_the_summary():
    task = GQATask.build(Sizes(hidden_size=8, vocab_size=9, summary_size=6), GQAConfig(answers=ANSWERS))
    assert task.head.transform["dense"].weight.shape == (12, 6) and task.head.output.weight.shape == (5, 12)


def test_choices_become_whether_the_answer_is_among_them():
    task = make_task()
    batch = questions("red", choices={"valid": ["red", "yes"], "plausible": ["red"]})
    [record] = predict(task, batch, torch.tensor([[3.0, 0, 0, 0, 1]]))
    assert (record.answer, record.right_answer, record.is_valid, record.is_plausible) == ("yes", "red", True, False)
    assert "choices" not in record.metadata
    assert task.correctness(record) == 0 and task.correctness(GQAPrediction(answer="yes", score=1)) is None
    assert [answer for answer, _ in task.ranked(record)][:2] == ["yes", "red"]
    described = task.describe(record)
    assert (described.answer, described.truth, described.group) == ("yes", "red", "query")
    assert "not balanced" in task.describe(msgspec.structs.replace(record, is_balanced=False)).note


@pytest.mark.parametrize("grounding", [True, False])
def test_attention_on_named_boxes_becomes_the_grounding_score(grounding):
    task = make_task(grounding=grounding)
    assert task.reads_attention == grounding
    batch = questions("red", named_boxes=[[0.0, 0.0, 0.5, 1.0], [0.25, 0.0, 0.75, 1.0]])
    attention = torch.zeros(1, 2, 6, 6)
    attention[:, :, 0, 3:] = torch.tensor([0.6, 0.2, 0.2])
    states = torch.zeros(1, 3, 8)
    encoded = EncoderOutput(states, states, attentions=(attention,))
    # the left and the right half of an image that is 20 pixels wide, and a box without area
    boxes, is_real = torch.tensor([[[0.0, 0, 10, 10], [10, 0, 20, 10], [5, 5, 5, 9]]]), torch.ones(1, 3).bool()
    sizes = torch.tensor([[[10.0, 20.0]] * 3])
    regions = regions_of_own_images(torch.zeros(1, 3, 2), boxes, sizes, is_real, torch.zeros(1, 3).long())
    output = ModelOutput(TaskOutput({}, torch.zeros(1, 5)), None, regions, encoded, batch)
    [record] = task.predict(batch, output)
    assert "named_boxes" not in record.metadata
    assert record.grounding == (pytest.approx(0.6 * 1.5 + 0.2 * 0.5) if grounding else None)
    assert task.metrics([record]).get("grounding") == record.grounding


def test_scored_answers():
    """LXMERT's files have no types of questions."""
    judge = make_task().answer_vocabulary.judge
    assert judge(ScoredAnswers({"no": 1.0, "yes": 0.3})) == ({"no": 1.0}, 1, {"right_answer": "no"})
    assert judge(ScoredAnswers({})) is None


def test_a_question_and_its_answer(tokenizer):
    preprocessor = make_task().preprocessor(TextTokenizer(tokenizer))
    sample = sample_of(SampleText(3, "Is it left?", {"right_answer": "left"}, CorrectAnswer("left")))
    [text] = preprocess(preprocessor, sample)
    assert decoded(text, tokenizer) == "[CLS] is it left ? [SEP]"
    assert text.targets.scores.tolist() == [0, 0, 1, 0, 0] and text.targets.best == 2
    [mirrored] = preprocess(preprocessor, sample, photo(flipped=True))
    assert decoded(mirrored, tokenizer) == "[CLS] is it right ? [SEP]"
    assert mirrored.targets.best == 3 and mirrored.record["right_answer"] == "right"
    [unknown] = preprocess(preprocessor, sample_of(SampleText(0, "it", {}, CorrectAnswer("blue"))))
    assert unknown.targets.best == -1 and not unknown.targets.scores.any()


# Attention of an answer over regions, from maps over words, regions or both


def attention_step(rows: dict[tuple[int, int], list[float]], texts: int = 1) -> torch.Tensor:
    """A map over three words, two regions and an end; (text, word) attends to the regions as given."""
    found = torch.zeros(texts, 2, 6, 6)
    for (text, place), shares in rows.items():
        for head in range(2):  # head 1 twice as much as head 0
            found[text, head, place, 3:5] = torch.tensor(shares) * (head + 1)
    return found


@pytest.mark.parametrize(
    ("steps", "attention_mask", "summary", "expected"),
    [
        (  # the last step that sees regions counts
            [{(0, 0): [0.5, 0.5]}, {(0, 0): [0.1, 0.3], (0, 1): [0.9, 0.0]}, {(0, 1): [0.2, 0.7]}],
            [[True, True]],
            None,
            [[0.25, 0.75]],
        ),
        (  # at the place of the summary, and at real regions
            [{(0, 1): [0.2, 0.6], (1, 2): [0.5, 0.1]}],
            [[True, True], [False, True]],
            [1, 2],
            [[0.25, 0.75], [0.0, 1.0]],
        ),
        ([{(0, 0): [0.4, 0.4]}], [[False, False]], None, [[0.0, 0.0]]),
    ],
)
def test_attention_to_regions(steps, attention_mask, summary, expected):
    count = len(attention_mask)
    ids, states = torch.ones(count, 3, dtype=torch.int64), torch.zeros(count, 1, 1)
    encoded = EncoderOutput(states, states, attentions=tuple(attention_step(step, count) for step in steps))
    texts = TextBatch(ids, ids, ids.bool(), None if summary is None else torch.tensor(summary))
    found = attention_to_regions(encoded, texts, torch.tensor(attention_mask))
    torch.testing.assert_close(found, torch.tensor(expected))

"""Questions of VQA and GQA: targets, losses, predictions with choices and attention, and rows from word embeddings."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from detector.structures import Loss
from e2e_vl.data.batching import pad_texts
from e2e_vl.encoders.base import read_summary
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.metrics.gqa import GQAPrediction
from e2e_vl.metrics.vqa import VQAPrediction
from e2e_vl.samples import CorrectAnswer, HumanAnswers, SampleText, ScoredAnswers
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, TaskOutput, TextBatch
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import GQAConfig, VQAConfig
from e2e_vl.tasks.gqa import GQATask, attention_to_regions
from e2e_vl.tasks.question_answering import AnswerTargets, AnswerTask
from e2e_vl.tasks.vqa import VQATask, VQAVocabulary
from e2e_vl.text import TextTokenizer
from tests.regions import regions_of_own_images
from tests.tasks.batches import make_batch, output_of
from tests.tasks.preprocessors import decoded, photo, preprocess, sample_of, tokens

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
    judged = [None if given is None else possible.labels_of(HumanAnswers(tuple(given))) for given in answers]
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


def predict(task: AnswerTask, batch: Batch, logits: torch.Tensor) -> list:
    return task.predict(output_of(batch, logits))


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


def test_one_right_answer_beside_human_ones():
    """Of GQA or Visual Genome, which write sentences; one that is in no list may have no loss."""
    vocabulary = VQAVocabulary(ANSWERS)
    assert vocabulary.labels_of(CorrectAnswer("Two.")) == ({"2": 1.0}, 2, {"answer_scores": {"2": 1.0}})
    assert vocabulary.labels_of(ScoredAnswers({"No.": 1.0})).best == 1
    elsewhere = vocabulary.labels_of(CorrectAnswer("On the wall."))
    both = [vocabulary.labels_of(HumanAnswers(tuple(FIRST))), elsewhere]
    targets = AnswerTargets.join([AnswerTargets(vocabulary.targets_of(one.scores), one.best) for one in both])
    for skips in (False, True):
        output, states = run(make_task(skip_unlisted=skips), two_questions(FIRST, None, targets=targets))
        loss, kept = output.losses["vqa"], 1 if skips else 2
        total = F.binary_cross_entropy_with_logits(output.logits[:kept], targets.scores[:kept], reduction="sum")
        torch.testing.assert_close(loss.mean, total / kept)
        loss.mean.backward()
        assert states.grad[0].any() and states.grad[1].any() != skips
    assert GQATask(HIDDEN, GQAConfig(answers=["red"])).answer_vocabulary.labels_of(ScoredAnswers({"Red.": 1})).best == 0


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
    task, plain = (make_task(answers=["yes", "hot dog", ""], init_from_words=is_on) for is_on in (True, False))
    before = plain.head.output.weight.clone()
    for one in (task, plain):
        one.init_weights(tokenizer, encoder, None)
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


# GQA


GQA_ANSWERS = ["yes", "no", "left", "right", "red"]


def gqa_task(**config) -> GQATask:
    torch.manual_seed(0)
    return GQATask(8, GQAConfig(**{"answers": GQA_ANSWERS} | config)).eval()


def gqa_questions(*answers: str, **record) -> Batch:
    classes = [GQA_ANSWERS.index(answer) if answer in GQA_ANSWERS else -1 for answer in answers]
    scores = np.array([[float(answer == other) for other in GQA_ANSWERS] for answer in answers], dtype=np.float32)
    types = {"structural": "query", "semantic": "attr", "detailed": "color"}
    known = {"text": "Is it?", "types": types, **record}
    return make_batch(
        [[0]] * len(answers),
        targets=AnswerTargets(torch.from_numpy(scores), torch.tensor(classes)),
        records=[{"question_id": str(n), "right_answer": answer, **known} for n, answer in enumerate(answers)],
    )


def test_the_softmax_loss_times_the_number_of_answers():
    """Computed by hand: five equal logits cost log 5, and with one logit of log 4 its answer costs log 2."""
    batch = gqa_questions("no", "purple")
    logits = torch.zeros(2, 5)
    logits[1, 0] = math.log(4)  # the first answer; the sum of the exponentials is 8

    def loss_of(**config) -> Loss:
        return gqa_task(loss="softmax_times_answers", **config)._loss(logits, batch.targets)

    without, first = loss_of(), loss_of(unlisted_is_first=True)
    assert (without.total.item(), without.count.item()) == (pytest.approx(5 * 1.6094379), 1)
    assert (first.total.item(), first.count.item()) == (pytest.approx(5 * (1.6094379 + 0.6931472)), 2)
    [record, _] = predict(gqa_task(loss="softmax_times_answers"), batch, logits)
    assert record.score == pytest.approx(0.2), "a share among all answers"


def test_the_hidden_layer_may_be_wider_than_the_summary():
    task = GQATask.build(Sizes(hidden_size=8, vocab_size=9, summary_size=6), GQAConfig(answers=GQA_ANSWERS))
    assert task.head.transform["dense"].weight.shape == (12, 6) and task.head.output.weight.shape == (5, 12)


def test_choices_become_whether_the_answer_is_among_them():
    task = gqa_task()
    batch = gqa_questions("red", choices={"valid": ["red", "yes"], "plausible": ["red"]})
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
    task = gqa_task(grounding=grounding)
    assert task.reads_attention == grounding
    batch = gqa_questions("red", named_boxes=[[0.0, 0.0, 0.5, 1.0], [0.25, 0.0, 0.75, 1.0]])
    attention = torch.zeros(1, 2, 6, 6)
    attention[:, :, 0, 3:] = torch.tensor([0.6, 0.2, 0.2])
    states = torch.zeros(1, 3, 8)
    encoded = EncoderOutput(states, states, attentions=(attention,))
    # the left and the right half of an image that is 20 pixels wide, and a box without area
    boxes, is_real = torch.tensor([[[0.0, 0, 10, 10], [10, 0, 20, 10], [5, 5, 5, 9]]]), torch.ones(1, 3).bool()
    sizes = torch.tensor([[[10.0, 20.0]] * 3])
    regions = regions_of_own_images(torch.zeros(1, 3, 2), boxes, sizes, is_real, torch.zeros(1, 3).long())
    output = ModelOutput(TaskOutput({}, torch.zeros(1, 5)), None, regions, encoded, batch)
    [record] = task.predict(output)
    assert "named_boxes" not in record.metadata
    assert record.grounding == (pytest.approx(0.6 * 1.5 + 0.2 * 0.5) if grounding else None)
    assert task.metrics([record]).get("grounding") == record.grounding


def test_scored_answers():
    """LXMERT's files have no types of gqa_questions."""
    labels_of = gqa_task().answer_vocabulary.labels_of
    assert labels_of(ScoredAnswers({"no": 1.0, "yes": 0.3})) == ({"no": 1.0}, 1, {"right_answer": "no"})
    assert labels_of(ScoredAnswers({})) is None


def test_a_question_of_gqa_and_its_answer(tokenizer):
    encode = gqa_task().preprocessor(TextTokenizer(tokenizer))
    sample = sample_of(SampleText(3, "Is it left?", {}, CorrectAnswer("left")))
    [text] = preprocess(encode, sample)
    assert decoded(text, tokenizer) == "[CLS] is it left ? [SEP]"
    assert text.targets.scores.tolist() == [0, 0, 1, 0, 0] and text.targets.best == 2
    [mirrored] = preprocess(encode, sample, photo(flipped=True))
    assert decoded(mirrored, tokenizer) == "[CLS] is it right ? [SEP]"
    assert mirrored.targets.best == 3 and mirrored.record["right_answer"] == "right"
    [unknown] = preprocess(encode, sample_of(SampleText(0, "it", {}, CorrectAnswer("blue"))))
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

"""VQA: targets, losses, what is predicted, and starting rows from word embeddings."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.structures import ImageBatch, Regions
from e2e_vl.data.batching import pad_texts
from e2e_vl.encoders.base import read_summary
from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.metrics.vqa import VQAPrediction
from e2e_vl.samples import HumanAnswers, Question, SampleText
from e2e_vl.structures import Ability, Batch, EncoderOutput, ModelOutput, TaskOutput, TextBatch, gather_regions
from e2e_vl.tasks.base import PredictionSummary
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.tasks.vqa import VQATask, VQAVocabulary
from e2e_vl.text import TextTokenizer, build_vocabulary, load_tokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, sample_of, tokens, word

HIDDEN, LENGTH = 8, 6
ANSWERS = ["yes", "no", "2", "", "<unk>", "yes"]
MASK = torch.tensor([2, 4])
FIRST = ["yes"] * 6 + ["no"] * 3 + ["maybe"]
SECOND = ["Two"] * 9 + ["2"]


def make_task(**config) -> VQATask:
    torch.manual_seed(0)
    return VQATask(HIDDEN, VQAConfig(**{"answers": ANSWERS} | config)).eval()


def targets_of(*answers: list[str] | None, normalised: bool = False) -> AnswerTargets:
    """What the wording of a task makes of the answers to each question; None: they are unknown."""
    possible = VQAVocabulary(ANSWERS, normalised=normalised)
    judged = [None if given is None else possible.judge(HumanAnswers(tuple(given))) for given in answers]
    return AnswerTargets.join(
        [AnswerTargets() if one is None else AnswerTargets(possible.targets_of(one.scores), one.best) for one in judged]
    )


def make_batch(*answers: list[str] | None, targets: AnswerTargets | None = None) -> Batch:
    sizes = torch.tensor([[10, 10]])
    records = [{"question_id": number, "answers": given} for number, given in enumerate(answers)]
    return Batch(
        images=ImageBatch(torch.zeros(1, 3, 10, 10), sizes, sizes, ["a.jpg"]),
        boxes=None,
        texts=TextBatch(
            *(torch.ones(2, LENGTH, dtype=kind) for kind in (torch.long, torch.long, torch.bool)), summary=MASK
        ),
        image_index=torch.zeros(2, 1, dtype=torch.long),
        targets=targets_of(*answers) if targets is None else targets,
        records=records,
    )


def run(task: VQATask, batch: Batch, seed: int = 0) -> tuple[ModelOutput, torch.Tensor]:
    regions = Regions([torch.zeros(0, 4)], [torch.zeros(0, 3)], [torch.zeros(0, 2)])
    text_regions = gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=False)
    states = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    summary = read_summary(states, None, batch.texts.summary)
    encoded = EncoderOutput(text=states, regions=torch.zeros(2, 1, HIDDEN), summary=summary)
    return ModelOutput(task(batch, text_regions, encoded), regions, text_regions, encoded, batch), states


def test_the_summary_decides():
    output, states = run(make_task(), make_batch(FIRST, SECOND))
    output.losses["vqa"].mean.backward()
    used = states.grad.abs().sum(dim=-1) > 0
    assert used.nonzero().tolist() == [[0, 2], [1, 4]]


def test_soft_targets():
    targets = targets_of(FIRST, SECOND).scores
    # "maybe" is unknown, "<unk>" never scores, of the two "yes" the first counts, and "Two" is not "2"
    torch.testing.assert_close(targets, torch.tensor([[1.0, 0.9, 0, 0, 0, 0], [0, 0, 0.3, 0, 0, 0]]))
    normalised = targets_of(SECOND, ["a", "<unk>", "unk"] * 3, normalised=True).scores
    torch.testing.assert_close(normalised, torch.tensor([[0, 0, 1.0, 0, 0, 0], [0, 0, 0, 0.9, 0, 0]]), atol=0.1, rtol=0)


def test_the_binary_loss_is_the_official_mean_times_the_number_of_answers():
    batch = make_batch(FIRST, SECOND)
    output, _ = run(make_task(), batch)
    expected = F.binary_cross_entropy_with_logits(output.task.logits, batch.targets.scores) * len(ANSWERS)
    torch.testing.assert_close(output.losses["vqa"].mean, expected)
    assert output.losses["vqa"].count == 2


def test_the_softmax_loss_leaves_out_what_has_no_known_answer():
    task = make_task(loss="softmax")
    output, _ = run(task, make_batch(["no"] * 5 + ["2"] * 2 + ["yes"] * 3, ["maybe"] * 10))
    loss = output.losses["vqa"]
    torch.testing.assert_close(loss.mean, F.cross_entropy(output.task.logits[:1], torch.tensor([1])))
    assert loss.count == 1
    output, states = run(task, make_batch(["maybe"] * 10, ["maybe"] * 10))
    output.losses["vqa"].mean.backward()
    assert output.losses["vqa"].mean == 0 and not states.grad.abs().sum()


def test_the_most_frequent_known_answer_is_the_best():
    assert targets_of(["maybe"] * 6 + ["no", "2"] * 2, ["maybe"], ["<unk>"] * 3 + ["2"]).best.tolist() == [1, -1, 2]
    assert targets_of(["Two"] * 9 + ["no"]).best.tolist() == [1]
    assert targets_of(["Two"] * 9 + ["no"], normalised=True).best.tolist() == [2]


def test_losses_learn_from_any_scores():
    scores, best = torch.rand(2, len(ANSWERS)), torch.tensor([3, 0])
    batch = make_batch(None, None, targets=AnswerTargets(scores, best))
    output, _ = run(make_task(), batch)
    expected = F.binary_cross_entropy_with_logits(output.task.logits, scores) * len(ANSWERS)
    torch.testing.assert_close(output.losses["vqa"].mean, expected)
    output, _ = run(make_task(loss="softmax"), batch)
    torch.testing.assert_close(output.losses["vqa"].mean, F.cross_entropy(output.task.logits, best))


def test_without_answers_there_is_no_loss():
    task = make_task()
    output, _ = run(task, make_batch(None, None))
    assert output.losses == {}
    with pytest.raises(ValueError, match="some texts of a batch have scores and others do not"):
        make_batch(FIRST, None)


def test_predictions_and_metrics():
    task, batch = make_task(top_answers=2), make_batch(FIRST, SECOND)
    output, _ = run(task, batch)
    logits = torch.tensor([[0.0, 2.0, 1.0, 0, 9.0, 0], [0, 0, 3.0, 1.0, 9.0, 0]])
    scored = ModelOutput(TaskOutput({}, logits), output.regions, output.text_regions, output.encoded, batch)
    first, second = task.predict(batch, scored)
    assert first.answer == "no" and second.answer == "2"  # never <unk>
    assert [answer for answer, _ in first.top_answers] == ["no", "2"]
    assert first.score == pytest.approx(1 / (1 + math.exp(-2)))
    assert first.question_id == 0
    assert task.correct(first) == pytest.approx(0.9) and task.correct(second) == pytest.approx(1)
    assert task.metrics([first, second])["accuracy"] == pytest.approx(0.95)
    assert task.correct(VQAPrediction(answer="no", score=1)) is None
    shares = make_task(loss="softmax").predict(batch, scored)[0]
    assert shares.score == pytest.approx(float(logits[0].softmax(0)[1]))
    assert len(shares.top_answers) == 5


def test_rows_start_from_word_embeddings(tmp_path):
    build_vocabulary(["yes no hot dog"], tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    encoder = VLBertModel(
        VLBertConfig(vocab_size=len(tokenizer), hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2)
    )
    task = make_task(answers=["yes", "hot dog", ""])
    before = task.head.output.weight.detach().clone()
    task.initialise(tokenizer, encoder, None)
    table, ids = encoder.get_input_embeddings().weight, tokenizer.convert_tokens_to_ids
    rows = task.head.output.weight
    torch.testing.assert_close(rows[0], table[ids("yes")])
    torch.testing.assert_close(rows[1], (table[ids("hot")] + table[ids("dog")]) / 2)
    assert torch.equal(rows[2], before[2])  # no wordpiece
    assert rows.requires_grad and not task.head.output.bias.any()
    task = make_task(answers=["yes"], initialise_from_words=False)
    before = task.head.output.weight.detach().clone()
    task.initialise(tokenizer, encoder, None)
    assert torch.equal(task.head.output.weight, before)


def questions(*answers: list[str] | None) -> SimpleNamespace:
    """Facts about data with these answers."""
    truths = [None if given is None else HumanAnswers(tuple(given)) for given in answers]
    return SimpleNamespace(truths=lambda: truths)


def test_questions_without_a_known_answer_are_counted_before_training(caplog):
    task, unknown = make_task(), ["purplish"] * 10
    with caplog.at_level(logging.INFO):
        task.check_data(questions(FIRST, SECOND, None), None)
        task.check_data(questions(), None)  # other data may have no such list
    assert not caplog.records
    with caplog.at_level(logging.INFO):
        task.check_data(questions(FIRST, SECOND, FIRST, ["<unk>"]), None)
        task.check_data(questions(FIRST, unknown, unknown), None)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "1 of 4 training questions (25.0 %) have no answer among the 6 possible ones" in caplog.text
    with pytest.raises(ValueError, match="Not one of the 2 training questions has an answer among the 6"):
        task.check_data(questions(unknown, unknown), None)
    make_task(normalised_targets=True).check_data(questions(["Two"]), None)
    with pytest.raises(ValueError, match="Not one of the 1"):
        task.check_data(questions(["Two"]), None)


def test_what_the_encoder_must_be_able_to_do():
    assert make_task(initialise_from_words=False).needs == (Ability.SUMMARY_OF_QUESTION,)
    assert make_task().needs == (Ability.SUMMARY_OF_QUESTION, Ability.WORD_EMBEDDINGS)


def test_the_divergence_of_scores_that_need_not_sum_to_one():
    """A text without a known answer costs nothing, but counts."""
    scores = torch.tensor([[0.9, 0.9, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0.0]])
    batch = make_batch(None, None, targets=AnswerTargets(scores, torch.tensor([0, -1])))
    task = make_task(loss="divergence")
    output, states = run(task, batch)
    shares = output.task.logits[0].log_softmax(dim=0)
    expected = (0.9 * (math.log(0.9) - shares[:2])).sum() / 2
    torch.testing.assert_close(output.losses["vqa"].mean, expected)
    output.losses["vqa"].mean.backward()
    assert torch.isfinite(states.grad).all() and not states.grad[1].any()
    record = task.predict(batch, output)[0]
    known = [number for number, answer in enumerate(ANSWERS) if answer != "<unk>"]
    assert record.score == pytest.approx(float(shares.exp()[known].max()))


def test_a_head_without_a_hidden_layer():
    task = make_task(hidden_layer=False)
    assert {name: tuple(value.shape) for name, value in task.state_dict().items()} == {
        "head.output.weight": (len(ANSWERS), HIDDEN),
        "head.output.bias": (len(ANSWERS),),
    }
    output, states = run(task, make_batch(FIRST, SECOND))
    summary = states[torch.arange(2), MASK]
    torch.testing.assert_close(output.task.logits, task.head.output(summary))


def test_the_unknown_answer_wins_only_where_it_may():
    logits = torch.tensor([[0.0, 2.0, 1.0, 0, 9.0, 0], [0, 0, 3.0, 1.0, 0.0, 0]])
    batch = make_batch(None, None, targets=AnswerTargets())
    for may, expected in ((False, ["no", "2"]), (True, ["<unk>", "2"])):
        task = make_task(unknown_can_win=may)
        output, _ = run(task, batch)
        scored = ModelOutput(TaskOutput({}, logits), output.regions, output.text_regions, output.encoded, batch)
        assert [record.answer for record in task.predict(batch, scored)] == expected


def test_the_first_of_equal_answers_wins():
    task = make_task(answers=[f"answer {number}" for number in range(40)], top_answers=3)
    logits = torch.zeros(2, 40)
    logits[1, [30, 7, 12]] = 1.0
    batch = make_batch(None, None, targets=AnswerTargets())
    found = task.predict(batch, ModelOutput(TaskOutput({}, logits), None, None, None, batch))
    assert [record.answer for record in found] == ["answer 0", "answer 7"]
    top = [[answer for answer, _ in record.top_answers] for record in found]
    assert top == [["answer 0", "answer 1", "answer 2"], ["answer 7", "answer 12", "answer 30"]]


def test_a_question_is_described_with_what_people_said():
    task = VQATask(8, VQAConfig(answers=["red", "blue"]))
    base = {"text": "What color?", "answer": "red", "score": 0.75}
    answers = {"answers": ["blue", "red", "blue"], "multiple_choice_answer": "blue", "question_type": "what"}
    note = "people said: blue (2), red (1)"
    assert task.describe(VQAPrediction.of(base | answers)) == PredictionSummary(
        "What color?", "red", 0.75, "blue", note, "what"
    )
    assert task.describe(VQAPrediction.of(base)) == PredictionSummary("What color?", "red", 0.75)


# A question in wordpieces with a place for its answer


GIVEN = HumanAnswers(("left side",) * 6 + ("left",) * 4)
SIDES = ["<unk>", "left", "right", "left side", "right side"]


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path, "red square left right blue side")


def preprocessor(tokenizer, **options):
    task = VQATask(8, VQAConfig(answers=SIDES))
    return task.preprocessor(TextTokenizer(tokenizer, **({"layout": VLBertModel.layout} | options)))


def asked(*words: str, truth: HumanAnswers | None = GIVEN):
    facts = {"question_id": 5} if truth is None else {"question_id": 5, "answers": list(truth.answers)}
    return sample_of(*(SampleText(2 * n, text, facts, truth) for n, text in enumerate(words)))


def test_the_answer_is_read_where_the_encoder_says(tokenizer):
    first, second = texts = word(preprocessor(tokenizer), asked("red square left", "blue"))
    assert tokens(first, tokenizer) == ["[CLS]", "red", "square", "left", "[SEP]", "[MASK]", "[SEP]"]
    assert first.encoding.token_type_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert (first.encoding.summary, second.encoding.summary) == (5, 3)
    assert pad_texts(texts).summary.tolist() == [5, 3]
    assert (first.record["text_index"], second.record["text_index"]) == (0, 2)
    assert first.record["answers"] == list(GIVEN.answers)
    [plain] = word(preprocessor(tokenizer, layout=type(VLBertModel.layout)()), asked("blue"))
    assert tokens(plain, tokenizer) == ["[CLS]", "blue", "[SEP]"] and plain.encoding.summary is None


def test_targets_of_the_answers(tokenizer):
    [text] = word(preprocessor(tokenizer), asked("blue"))
    np.testing.assert_allclose(text.targets.scores, [0, 1, 0, 1, 0])
    assert text.targets.scores.dtype == np.float32
    assert text.targets.best == 3
    [unknown] = word(preprocessor(tokenizer), asked("blue", truth=HumanAnswers(("green",) * 10)))
    assert not unknown.targets.scores.any() and unknown.targets.best == -1


def test_a_mirrored_image_swaps_left_and_right_in_question_and_answers(tokenizer):
    [text] = word(preprocessor(tokenizer), asked("red square left"), photo(flipped=True))
    assert tokens(text, tokenizer)[1:4] == ["red", "square", "right"]
    assert text.record["answers"] == ["right side"] * 6 + ["right"] * 4
    np.testing.assert_allclose(text.targets.scores, [0, 0, 1, 0, 1])
    assert text.targets.best == 4 and text.record["flipped"] is True


def test_without_answers_there_is_nothing_to_learn(tokenizer, tmp_path):
    [text] = word(preprocessor(tokenizer), asked("blue", truth=None))
    assert text.targets.scores is text.targets.best is None and "answers" not in text.record
    task = VQATask(8, VQAConfig(answers=SIDES))
    [text] = word(preprocessor(tokenizer), task.question(Question(tmp_path / "photo.jpg", "left?")))
    assert text.targets.scores is None


def test_a_blank_question_keeps_the_place_of_its_answer(tokenizer):
    [text] = word(preprocessor(tokenizer, is_blank=True), asked("red square left"))
    assert tokens(text, tokenizer) == ["[CLS]", "[SEP]", "[MASK]", "[SEP]"]
    assert text.encoding.token_type_ids.tolist() == [0, 0, 1, 1] and text.encoding.summary == 2


def test_long_questions_lose_their_last_pieces(tokenizer):
    [text] = word(preprocessor(tokenizer, max_length=5), asked("red square left"))
    assert tokens(text, tokenizer) == ["[CLS]", "red", "[SEP]", "[MASK]", "[SEP]"]
    assert text.record["cut_wordpieces"] == 2
    with pytest.raises(ValueError, match="alone need 4"):
        preprocessor(tokenizer, max_length=3)

"""VCR: losses of choices and regions, predictions, truncation, and the four texts of a question."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from detector.errors import UserError
from detector.structures import Regions
from e2e_vl.data.config import VCRDatasetConfig
from e2e_vl.preprocessing import EncodedText
from e2e_vl.samples import AnnotatedObjects, Question
from e2e_vl.structures import Batch, EncoderOutput, RegionLabels, TaskOutput, TextRegions, gather_regions
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import VCRConfig
from e2e_vl.tasks.vcr import (
    Piece,
    VCRPrediction,
    VCRTargets,
    VCRTask,
    parse_sentence,
    truncate_answers,
    truncate_rationales,
)
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import make_batch, output_of
from tests.tasks.preprocessors import decoded, preprocess, tokens

H = 6
CLASSES = [torch.tensor([2, 0]), torch.tensor([1])]  # of the candidate boxes of two images


def make_regions(whole_image: bool = True) -> TextRegions:
    """Two questions about two images, of 2 and 1 candidate boxes."""
    counts = [len(rows) + whole_image for rows in CLASSES]
    regions = Regions(
        boxes=[torch.rand(count, 4) for count in counts],
        features=[torch.rand(count, 5) for count in counts],
        class_logits=[torch.zeros(count, 3) for count in counts],
    )
    image_index = torch.tensor([0] * 4 + [1] * 4)[:, None]
    return gather_regions(regions, torch.tensor([[10, 10], [10, 10]]), image_index, whole_image=whole_image)


def two_questions(labels: list[int] | None = None) -> Batch:
    shown = labels or [None, None]
    return make_batch(
        [[0]] * 4 + [[1]] * 4,
        sizes=[[10, 10]] * 2,
        targets=VCRTargets(None if labels is None else F.one_hot(torch.tensor(labels), 4).flatten().float()),
        region_labels=RegionLabels(classes=CLASSES),
        records=[{"text_index": row // 4, "annot_id": f"val-{row // 4}", "label": shown[row // 4]} for row in range(8)],
    )


def run(task: VCRTask, batch: Batch, whole_image: bool = True) -> tuple[TaskOutput, TextRegions, EncoderOutput]:
    torch.manual_seed(0)
    regions = make_regions(whole_image)
    states = torch.randn(8, regions.attention_mask.shape[1], H, requires_grad=True)
    encoded = EncoderOutput(torch.randn(8, 3, H), states, summary=torch.randn(8, H, requires_grad=True))
    return task(batch, regions, encoded), regions, encoded


def test_choices_are_read_from_the_summary_and_regions_from_their_states():
    task = VCRTask.build(Sizes(hidden_size=8, vocab_size=9, summary_size=24), VCRConfig())
    assert (task.head.output.in_features, task.region_classifier.output.in_features) == (24, 8)


@pytest.mark.parametrize("whole_image", [True, False])
def test_every_region_of_every_choice_is_classified(whole_image):
    task = VCRTask(H, VCRConfig(num_classes=5)).eval()
    output, regions, encoded = run(task, two_questions([2, 0]), whole_image)
    first = [0] if whole_image else []  # the whole image is a class of its own, before those of objects
    classes = [torch.tensor(first + (rows + 1).tolist()) for rows in CLASSES]
    states = [encoded.regions[row, regions.attention_mask[row]] for row in range(8)]
    scores = task.region_classifier(torch.cat(states))
    expected = F.cross_entropy(scores, torch.cat([classes[row // 4] for row in range(8)]))
    torch.testing.assert_close(output.losses["region_class"].mean, expected)
    assert output.losses["region_class"].count == regions.attention_mask.sum() == 4 * sum(map(len, classes))
    output.losses["region_class"].mean.backward()
    assert torch.equal(encoded.regions.grad.any(dim=2), regions.attention_mask)
    without = VCRTask(H, VCRConfig(region_loss_weight=0.0))
    assert set(run(without, two_questions([2, 0]))[0].losses) == {"choice"}


def test_one_prediction_per_question():
    task, batch = VCRTask(H).eval(), two_questions([2, 0])
    output, _, _ = run(task, batch)
    records = task.predict(output_of(batch, output.logits))
    assert [(record.text_index, record.annot_id) for record in records] == [(0, "val-0"), (1, "val-1")]
    for record, logits in zip(records, output.logits, strict=True):
        assert record.probabilities == pytest.approx(logits.softmax(dim=0).tolist())
        assert record.choice == int(logits.argmax())


def test_metrics_count_the_questions_with_a_label():
    task, rows = VCRTask(H), ((1, 1, "colour"), (1, 0, "colour"), (3, 3, "pair"), (3, None, None))
    records = [
        VCRPrediction(probabilities=(0.25,) * 4, choice=choice, label=label, family=family)
        for choice, label, family in rows
    ]
    assert [task.correctness(record) for record in records] == [1, 0, 1, None]
    assert task.metrics(records) == {"accuracy": 2 / 3, "accuracy/colour": 0.5, "accuracy/pair": 1.0}
    assert task.metrics(records[3:]) == {}


def test_the_whole_image_is_a_class_too():
    info = SimpleNamespace(class_names=["person", "chair"])
    VCRTask(H, VCRConfig(num_classes=3)).check_data(info, None)
    with pytest.raises(UserError, match=r"task\.config\.num_classes .*set it to 3"):
        VCRTask(H, VCRConfig(num_classes=2)).check_data(info, None)


def pieces(number: int) -> list[Piece]:
    return [Piece(index, -1, index) for index in range(number)]


def test_the_longer_of_question_and_answer_is_cut():
    question, answers = pieces(6), [pieces(3), pieces(9), pieces(5)]
    truncate_answers(question, answers, limit=8)
    # 6 + 3: the question -> 5; 5 + 9: the answer -> 5, a tie, the question -> 4, ... and the third sees what is left
    assert ([len(answer) for answer in answers], len(question)) == ([3, 4, 4], 4)
    assert question == pieces(4)
    question, answers = pieces(3), [pieces(3)]
    truncate_answers(question, answers, limit=5)
    assert (len(question), len(answers[0])) == (2, 3)


def test_cutting_rationales():
    question, answer, rationales = pieces(4), pieces(3), [pieces(9), pieces(5)]
    truncate_rationales(question, answer, rationales, limit=10)
    assert (len(question), len(answer), [len(rationale) for rationale in rationales]) == (2, 3, [5, 5])
    question, answer, rationales = pieces(2), pieces(6), [pieces(4)]
    truncate_rationales(question, answer, rationales, limit=8)
    assert (len(question), len(answer), len(rationales[0])) == (1, 3, 4)


@pytest.mark.parametrize(
    ("text", "has_labels", "is_cut"), [(2, True, True), (0, True, False), (2, False, False), (0, False, False)]
)
def test_rationales_without_a_label_are_not_cut(tiny, text, has_labels, is_cut):
    """As in the official VL-BERT code, whose test mode does not truncate them. The right answer is answer 2."""
    if not has_labels:
        tiny.lines[0]["answer_label"] = tiny.lines[0]["rationale_label"] = None
    preprocessor = VCRTask(8, VCRConfig(max_pieces=9)).preprocessor(TextTokenizer(tiny.tokenizer))
    dataset = tiny.dataset(question="rationale", condition_on="each")
    lengths = [len(one.encoding.input_ids) for one in preprocess(preprocessor, dataset.sample((text,)))]
    assert (max(lengths) == 12) == is_cut


def test_sentences_of_users_name_objects():
    assert parse_sentence("Why is [0, 2] near [1]'s hat ?", 3) == ["Why", "is", [0, 2], "near", [1], "'s", "hat", "?"]
    assert parse_sentence("[sic] 3", 0) == ["[sic]", "3"]
    with pytest.raises(ValueError, match="refers to the object \\[3\\], but has only 3 boxes"):
        parse_sentence("[0,3] waits", 3)


READER = set(VCRDatasetConfig.__struct_fields__)


def texts_of(tiny, *, training=False, epoch=0, **options) -> list[EncodedText]:
    """The four texts of the first question; `options` are the reader's and the task's."""
    reader = {name: value for name, value in options.items() if name in READER}
    config = VCRConfig(**{name: value for name, value in options.items() if name not in READER})
    preprocessor = VCRTask(8, config).preprocessor(TextTokenizer(tiny.tokenizer, training=training))
    return preprocess(preprocessor, tiny.dataset(**reader).sample((0,)), epoch=epoch)


def test_four_texts_of_a_question(tiny):
    tiny.lines[0]["family"] = "colour"
    texts = texts_of(tiny)
    assert len(texts) == 4
    first = texts[0]
    assert decoded(first, tiny.tokenizer) == "[CLS] why is riley and chair there ? [SEP] no casey . [SEP]"
    assert first.encoding.token_type_ids.tolist() == [0] * 9 + [1] * 4
    assert first.encoding.summary is None
    assert first.region_of_token.tolist() == [-1, -1, -1, 1, -1, 2, -1, -1, -1, -1, 0, -1, -1]
    assert decoded(texts[2], tiny.tokenizer).endswith("[SEP] riley ' s chair . [SEP]")
    assert texts[2].region_of_token[9:].tolist() == [1, -1, -1, -1, -1, -1]
    assert [float(text.targets.is_correct) for text in texts] == [0, 0, 1, 0]
    assert {text.image_index for text in texts} == {(0,)}
    record = texts[3].record
    assert (record["annot_id"], record["label"], record["family"]) == ("val-0", 2, "colour")
    assert (record["text"], record["choices"][0]) == ("Why is Riley and chair there ?", "No Casey .")
    assert record["named_boxes"][1:3] == [("Riley", (30, 0, 50, 59)), ("chair", (60, 30, 95, 59))]
    assert all(text.region_of_token is None for text in texts_of(tiny, ground_words=False))


def test_the_control_without_questions(tiny):
    first = texts_of(tiny, blank_question=True)[0]
    assert decoded(first, tiny.tokenizer) == "[CLS] [SEP] no casey . [SEP]"


def test_people_are_named_in_turn_and_in_training_from_anywhere(tiny):
    seen = {decoded(texts_of(tiny, training=True, epoch=epoch)[0], tiny.tokenizer) for epoch in range(20)}
    assert len(seen) > 5
    assert len({decoded(texts_of(tiny, epoch=epoch)[0], tiny.tokenizer) for epoch in range(5)}) == 1
    fixed = texts_of(tiny, training=True, rotate_names=False, epoch=3)[0]
    assert tokens(fixed, tiny.tokenizer)[3] == "riley"
    own = texts_of(tiny, people_names=("Quinn", "Pat"))[0]
    assert decoded(own, tiny.tokenizer).startswith("[CLS] why is pat and chair there")


def test_names_by_mention(tiny):
    """In the question [1] comes first; in each choice the names continue."""
    tiny.lines[0]["answer_choices"][1] = [[3, 0], "and", [1], [2], "."]
    choices = ["No Riley .", "Riley Jessie and Casey chair ."]
    texts = texts_of(tiny, name_order="mention", join_word=None, training=True, epoch=5)
    assert decoded(texts[0], tiny.tokenizer) == f"[CLS] why is casey chair there ? [SEP] {choices[0].lower()} [SEP]"
    assert decoded(texts[1], tiny.tokenizer).endswith(f"[SEP] {choices[1].lower()} [SEP]")
    assert texts[1].region_of_token[[3, 4, 8, 9, 11, 12]].tolist() == [1, 2, 3, 0, 1, 2]
    assert texts[0].record["choices"][:2] == choices and texts[0].record["named_boxes"][1][0] == "Casey"


def question(answer: str | None = None, choices: tuple = ("yes", "no", "[0] is", "[1]"), **more) -> Question:
    names = ("chair", "person")
    boxes = AnnotatedObjects(np.array([[1.0, 2, 9, 8], [5, 5, 20, 20]]), "--boxes", names=names)
    given = {"class_names": ("person", "cat", "chair"), "boxes": boxes} | more
    return Question(Path("a.jpg"), "Why is [0,1] here ?", choices=choices, answer=answer, **given)


def test_a_question_names_the_given_boxes():
    sample = VCRTask(8).question(question())
    [text], [image] = sample.texts, sample.images
    assert text.query == (["Why", "is", [0, 1], "here", "?"],) and text.choices[2] == [[0], "is"]
    assert image.objects.classes.tolist() == [2, 0]
    assert image.objects.outlines[0][0].tolist() == [[1, 2], [10, 2], [10, 9], [1, 9]]
    sample = VCRTask(8).question(question("because [1]", accepts_answer=True))
    assert sample.texts[0].query[1] == ["because", [1]]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question(choices=("yes", "no")), "four choices, and no answer"),
        (question(accepts_answer=True), "the answer, for which"),
        (question(class_names=("cat", "person")), "--boxes: the class 'chair'"),
    ],
)
def test_questions_that_cannot_be_answered(asked, message):
    with pytest.raises(UserError, match=message):
        VCRTask(8).question(asked)

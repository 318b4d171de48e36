"""Pre-training: the sum of its objectives, predictions, answers to users, texts, and questions with choices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from detector.errors import UserError
from detector.structures import ImageBatch
from e2e_vl.config_files import load_config
from e2e_vl.model import VisionLanguageModel
from e2e_vl.preprocessing import EncodedText
from e2e_vl.run.build import build_task
from e2e_vl.samples import AnnotatedObjects, PhraseBoxes, Question, SampleText
from e2e_vl.structures import Ability, Batch, MaskingBatch, TextBatch
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import MaskedWordsConfig, PretrainingConfig, VCRConfig
from e2e_vl.tasks.objectives.base import ObjectiveCounts, ObjectivePreprocessor, PretrainingPrediction, Sizes, TextDraft
from e2e_vl.tasks.objectives.texts import MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels, WordMasking
from e2e_vl.tasks.pretraining import PretrainingPreprocessor, PretrainingTargets, PretrainingTask, build_objectives
from e2e_vl.tasks.vcr import VCRPreprocessor
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import decoded, preprocess, sample_of
from tests.tasks.tiny_pretraining import BOXES, CLASSES, assert_same, make_batch, make_model, make_pairs
from tests.weights.starts import replaced

SIZES = Sizes(hidden_size=8, vocab_size=5, feature_dim=4, num_classes=6)


def make_task(*names: str, **config) -> PretrainingTask:
    objectives = ("masked_words", "masked_text", "masked_regions", "relationship")
    weights = {name: float(name in names) for name in objectives}
    return PretrainingTask(SIZES, PretrainingConfig(**config), build_objectives(weights, SIZES))


def test_texts_of_two_images_share_all_objectives():
    """A region counts once for every text that reads it, whichever of the text's images it is in."""
    model = make_model(encoder={"max_images": 2}, objectives={"relationship": 1.0}, region_probability=1.0).eval()
    output = model(make_pairs())
    counts = {name: float(loss.count) for name, loss in output.losses.items()}
    assert counts == {"masked_words": 2, "masked_text": 1, "masked_regions": 5 + 5 + 2, "relationship": 3}
    truth = torch.cat(output.batch.region_labels.class_probs)
    logits = output.task.parts["masked_regions"].log_softmax(dim=1)
    order = [0, 1, 2, 3, 4, 3, 4, 0, 1, 2, 3, 4]  # regions of the two images, then of the second and the first
    expected = -(truth[order] * logits).sum(dim=1).mean()
    torch.testing.assert_close(output.losses["masked_regions"].mean, expected)
    sum(loss.mean for loss in output.losses.values()).backward()
    assert model.detector.backbone.stem.conv1.weight.grad.abs().sum() > 0


def test_predictions_count_captions_only():
    model = make_model(region_probability=1.0, objectives={"relationship": 1.0}).eval()
    batch = make_batch()
    with torch.no_grad():
        output = model(batch)
    records = model.task.predict(output)
    assert [record.text_index for record in records] == [0, 1, 2]
    counts = {name: [record.objectives[name].count for record in records] for name in model.task.objectives}
    assert counts["masked_words"] == [1, 1, 0] and counts["masked_regions"] == [3, 3, 2]
    assert counts["relationship"] == [1, 1, 1]
    regions = [record.objectives["masked_regions"] for record in records]
    assert [[item.position for item in own.items] for own in regions] == [[1, 2, 3], [1, 2, 3], [1, 2]]
    assert [sum(one.predicted == one.truth for one in own.items) for own in regions] == [own.right for own in regions]
    scores = model.task.metrics(records)
    assert set(scores) == {"masked_words", "masked_regions", "relationship"}
    assert scores["masked_regions"] == pytest.approx(sum(own.right for own in regions) / 8)
    batch.records[1] = {}  # an objective's own text about an image, beside those of the data
    assert [record.text_index for record in model.task.predict(output)] == [0, 2]
    nothing = PretrainingPrediction(objectives={name: ObjectiveCounts(0, 0) for name in model.task.objectives})
    assert model.task.correctness(nothing) is None and model.task.describe(nothing).answer == "nothing was masked"


def test_what_is_right_is_counted_per_text_and_objective():
    model = make_model(objectives={"relationship": 1.0}, region_probability=0.0).eval()
    for bias in (model.task.word_head.bias, model.task.relationship.head.bias):
        bias.data.fill_(-100.0)
    model.task.word_head.bias.data[9] = model.task.relationship.head.bias.data[0] = 100.0
    batch = make_batch()  # words 9 and 8 of texts 0 and 1; texts 0 and 2 match
    with torch.no_grad():
        records = model.task.predict(model(batch))
    assert [record.objectives["masked_words"].right for record in records] == [1, 0, 0]
    assert [record.objectives["relationship"].right for record in records] == [0, 1, 0]
    assert [model.task.correctness(record) for record in records] == [0.5, 0.5, 0.0]
    assert model.task.metrics(records) == {"masked_words": 0.5, "relationship": pytest.approx(1 / 3)}
    right, wrong = map(model.task.describe, records[:2])  # there is no tokenizer, and so wordpieces are numbers
    assert right.answer == "1 of 1 masked words, 0 of 1 relationship found"
    assert (right.mistakes, right.note) == ((), "masked words: 1: wordpiece 9")
    assert wrong.mistakes == (("wordpiece 8 (words)", "wordpiece 9 (words)"),)
    assert wrong.note == "masked words: 2: wordpiece 9 instead of wordpiece 8"


def test_an_encoder_needs_what_the_objectives_read():
    assert make_task("masked_words", "masked_text").needs == (Ability.WORD_EMBEDDINGS,)
    assert make_task("relationship", mask_pixels=False).needs == (Ability.SUMMARY_OF_SINGLE,)
    assert make_task("masked_regions").needs == (Ability.MASKED_REGIONS,)
    needs = make_task("masked_words", "masked_regions", mask_pixels=False).needs
    assert needs == (Ability.WORD_EMBEDDINGS, Ability.MASKED_REGIONS, Ability.MASKED_FEATURES)


def test_only_objectives_on_regions_mask_them():
    assert make_task("masked_regions").region_masking.predicts_regions
    assert not make_task("masked_words").region_masking.predicts_regions


CORNER = [[6.0, 6.0, 40.0, 40.0]]


def question_batch(masked: list[list[float]] | None = None, mask_at: int = 1) -> Batch:
    """One text with one [MASK] about the first image; boxes of it that a user masks."""
    batch = make_batch()
    images, texts = batch.images, batch.texts
    labels, corpus = torch.full((2, 1, 7), -1)
    labels[0, mask_at] = 9
    parts = {
        "masked_words": WordLabels(labels),
        "masked_text": WordLabels(corpus),
        "masked_regions": Targets(),
        "relationship": MatchTargets(torch.tensor([1])),
    }
    return dataclasses.replace(
        batch,
        images=ImageBatch(images.pixels[:1], images.sizes[:1], images.original_sizes[:1] * 2, images.names[:1]),
        boxes=batch.boxes[:1],
        texts=TextBatch(texts.input_ids[:1], texts.token_type_ids[:1], texts.attention_mask[:1]),
        image_index=batch.image_index[:1],
        targets=PretrainingTargets(parts),
        masking=MaskingBatch(batch.masking.seeds[:1], [torch.tensor(masked or [], dtype=torch.float32).reshape(-1, 4)]),
        records=[{"text_index": 0, "text": "[MASK] b"}],
    )


def answer(model: VisionLanguageModel, batch: Batch) -> PretrainingPrediction:
    with torch.no_grad():
        return model.task.predict_answers(model(batch))[0]


def test_every_masked_box_is_classified():
    boxes = [*CORNER, [60.0, 5.0, 90.0, 25.0]]
    record = answer(make_model(region_probability=1.0).eval(), question_batch(boxes))
    assert [list(one.box) for one in record.masked_regions] == (2 * torch.tensor(boxes)).tolist()  # original pixels
    assert all(len(region.classes) == CLASSES and region.seen is not None for region in record.masked_regions)
    shares = [share for _, share in record.masked_regions[0].classes]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert {name for name, _ in record.masked_regions[0].classes} == {*"abcd", "background"}


def test_names_of_masked_regions_follow_the_order_of_the_classes():
    """The same model with its classes in another order says the same."""
    answers = []
    for place in ("last", "first"):
        model = make_model(background=place).eval()
        if place == "first":
            for name in ("weight", "bias"):
                rows = getattr(model.task.masked_regions.output, name)
                rows.data = rows.data.roll(1, dims=0)
        answers += answer(model, question_batch(CORNER)).masked_regions
    assert answers[0].seen[0] == answers[1].seen[0] in [*"abcd", "background"]
    assert answers[0].seen[1] == pytest.approx(answers[1].seen[1])
    assert [name for name, _ in answers[0].classes] == [name for name, _ in answers[1].classes]


def test_without_boxes_to_mask_no_region_is_masked():
    model = make_model(region_probability=1.0).eval()
    batch = question_batch()
    with torch.no_grad():
        output = model(batch)
        record = model.task.predict_answers(output)[0]
    assert output.batch.boxes[0].tolist() == BOXES[0] and not output.batch.masking.masked_regions.is_masked[0].any()
    plain = make_model(objectives={"masked_regions": 0.0}).eval()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    of_regions = ("teacher.", "task.masked_regions.")
    assert not missing and unexpected and all(name.startswith(of_regions) for name in unexpected)
    with torch.no_grad():
        expected = plain(dataclasses.replace(batch, masking=MaskingBatch(batch.masking.seeds))).task.parts[
            "masked_words"
        ]
    assert_same(output.task.parts["masked_words"], expected)
    best = int(expected[0].argmax())
    assert record.filled == f"wordpiece {best} b" and record.masked_regions == ()
    assert record.masks[0][0] == (f"wordpiece {best}", pytest.approx(float(expected[0].softmax(dim=0)[best])))
    assert answer(plain, batch).masks and not answer(plain, batch).masked_regions


def test_what_is_masked_must_not_be_truncated():
    model = make_model(max_length=5).eval()
    with pytest.raises(UserError, match=r"a \[MASK\] is truncated"):
        answer(model, question_batch(mask_at=5))
    batch = question_batch([[10.0 * row, 5.0, 10.0 * row + 8, 30.0] for row in range(4)])
    batch.records[0]["text"] = "b"
    with pytest.raises(UserError, match="masked region is truncated"):
        answer(model, batch)


def ask(text: str = "a [MASK] dog", to_mask: list | None = None, **more) -> Question:
    boxes = None if to_mask is None else AnnotatedObjects(np.array(to_mask, dtype=np.float64).reshape(-1, 4), "--boxes")
    return Question(Path("photo.jpg"), text, boxes_to_mask=boxes, **more)


def test_a_question_is_a_sample_with_the_given_boxes():
    task, given = make_model().task, AnnotatedObjects(np.array([[1.0, 2, 3, 4]]), "--boxes")
    sample = task.question(ask(to_mask=[[5, 6, 7, 8]], boxes=given))
    [image], [text] = sample.images, sample.texts
    assert sample.from_user and image.file == Path("photo.jpg") and text.words == "a [MASK] dog"
    assert image.boxes.boxes.tolist() == [[1, 2, 3, 4]] and image.boxes_to_mask.tolist() == [[5, 6, 7, 8]]
    [image] = task.question(ask()).images
    assert image.boxes is None and image.boxes_to_mask.shape == (0, 4)  # none but the given ones: here none
    task.question(ask("a dog", to_mask=[[5, 6, 7, 8]]))


@pytest.mark.parametrize(
    ("question", "objectives", "message"),
    [
        (ask("a dog", to_mask=[]), {}, r"write \[MASK\] in the text, or mask boxes"),
        (ask(answer="yes"), {}, "takes no given answer"),
        (ask(to_mask=[[0, 0, 9, 9]]), {"masked_regions": 0.0}, "without masked regions"),
    ],
)
def test_questions_that_cannot_be_answered(question, objectives, message):
    with pytest.raises(UserError, match=message):
        make_model(objectives=objectives).task.question(question)


class TwoCaptions(ObjectivePreprocessor):
    """Makes a pair of each text and the next one of the data."""

    def edit_text(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        draft.second = draft.sample.pool[index + 1]


class OtherCaption(ObjectivePreprocessor):
    """Replaces each text by the next one of the data."""

    def edit_text(self, draft: TextDraft, index: int, generator: np.random.Generator) -> None:
        draft.words = draft.sample.pool[index + 1]


def edited(tokenizer, part: type[ObjectivePreprocessor], probability: float = 0.0, **options) -> EncodedText:
    """A caption with a phrase, of which `part` makes something, and whose words are masked."""
    text = SampleText(0, "the red box", {}, phrases=PhraseBoxes(((0, 11),), (np.zeros((1, 4)),), is_complete=True))
    text_tokenizer = TextTokenizer(tokenizer, with_phrase_spans=True, **options)
    masking = WordMasking(text_tokenizer, MaskedWordsConfig(probability=probability, always_mask=True))
    parts = {"part": part(text_tokenizer), "masked_words": masking}
    sample = sample_of(text, pool=["the red box", "a dog and a cat"])
    [example] = preprocess(PretrainingPreprocessor(text_tokenizer, parts), sample)
    return example


def test_a_pair_that_is_too_long_is_cut_with_its_labels(tokenizer):
    text = edited(tokenizer, TwoCaptions, probability=1.0, max_length=8)
    whole = edited(tokenizer, TwoCaptions, max_length=8)
    assert decoded(whole, tokenizer) == "[CLS] the red box [SEP] a dog [SEP]"
    assert text.record["truncated_wordpieces"] == 3
    labels = text.targets.parts["masked_words"].labels
    np.testing.assert_array_equal(np.where(labels < 0, text.encoding.input_ids, labels), whole.encoding.input_ids)


@pytest.mark.parametrize(
    ("part", "spans"), [(TwoCaptions, [[1, 4]]), (OtherCaption, []), (ObjectivePreprocessor, [[1, 4]])]
)
def test_phrases_belong_to_the_text_of_the_data(tokenizer, part, spans):
    """Those of the first text of two stay; another caption has none."""
    phrases = edited(tokenizer, part, probability=0.9).phrases
    assert phrases.spans.tolist() == spans and phrases.is_complete == bool(spans)
    assert phrases.words == ("a dog and a cat" if part is OtherCaption else "the red box")
    characters = [phrases.words[slice(*place)] for place in phrases.offsets if place[1]]
    assert characters == phrases.words.split()


CONFIG = "configs/tiny/visual_bert_pretraining.yaml"
WORDS = {"mask_size": 7, "rotate_names": False}


def choice_task(tokenizer, drawn: str = "random", texts: str = "labelled", **masking) -> PretrainingTask:
    config = load_config(CONFIG)
    settings = {
        "objectives": {
            "masked_words": {"weight": 1.0, **masking},
            "masked_text": 0.0,
            "masked_regions": 0.0,
            "relationship": {"weight": 1.0, "text_format": texts},
        },
        "choices": {"task": "vcr", "config": WORDS, "drawn": drawn},
    }
    return build_task(replaced(config, task={"config": settings}), Sizes(8, len(tokenizer)))


def choices_of(task, tiny, index: int = 0, epoch: int = 0, config: VCRConfig | None = None) -> list:
    text_tokenizer = TextTokenizer(tiny.tokenizer, training=True)
    preprocessor = task.preprocessor(text_tokenizer) if config is None else VCRPreprocessor(text_tokenizer, config)
    return preprocess(preprocessor, tiny.dataset().sample((index,)), epoch=epoch)


def test_a_random_choice_is_encoded_by_the_other_task(tiny):
    task = choice_task(tiny.tokenizer, probability=0.0)
    assert task.instance_masks.size == 7
    choices = choices_of(task, tiny, config=VCRConfig(**WORDS))
    shown = set()
    for epoch in range(40):
        [text] = choices_of(task, tiny, epoch=epoch)
        [number] = [
            n for n, one in enumerate(choices) if np.array_equal(one.encoding.input_ids, text.encoding.input_ids)
        ]
        np.testing.assert_array_equal(text.encoding.token_type_ids, choices[number].encoding.token_type_ids)
        np.testing.assert_array_equal(text.region_of_token, choices[number].region_of_token)
        assert int(text.targets.parts["relationship"].is_match) == (number == 2) == text.record["is_match"]
        shown.add(number)
    assert shown == {0, 1, 2, 3} and not [name for name, _ in task.named_modules() if "region_classifier" in name]


def test_wordpieces_of_choices_are_masked(tiny):
    plain, masked = (choice_task(tiny.tokenizer, "in_turn", probability=p, always_mask=True) for p in (0.0, 0.5))
    [before], [after] = choices_of(plain, tiny), choices_of(masked, tiny)
    labels = after.targets.parts["masked_words"].labels
    is_masked = labels >= 0
    assert 0 < is_masked.sum() < len(labels) and not is_masked[before.encoding.source < 0].any()
    np.testing.assert_array_equal(labels[is_masked], before.encoding.input_ids[is_masked])
    assert (after.encoding.input_ids[is_masked] == tiny.tokenizer.mask_token_id).all()
    np.testing.assert_array_equal(after.encoding.input_ids[~is_masked], before.encoding.input_ids[~is_masked])


def test_choices_that_cannot_be_read(tiny):
    with pytest.raises(UserError, match=r"task\.config\.objectives\.relationship\.text_format"):
        choices_of(choice_task(tiny.tokenizer, texts="pair"), tiny)
    with pytest.raises(UserError, match=r"task\.config\.choices\.task"):
        choices_of(make_task("masked_words"), tiny)

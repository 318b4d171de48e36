"""Pre-training is a sum of objectives: their losses, what is counted, and settings that cannot work."""

from __future__ import annotations

import types

import pytest
import torch

from e2e_vl.parts import OBJECTIVES as BUILDABLE
from e2e_vl.region_masking import RegionMasking
from e2e_vl.structures import Ability, RegionLabels, RegionMasks
from e2e_vl.tasks.config import (
    MaskedRegionsConfig,
    MaskedTextConfig,
    MaskedWordsConfig,
    PretrainingConfig,
    RelationshipConfig,
)
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.objectives.regions import MaskedRegions
from e2e_vl.tasks.objectives.texts import Relationship
from e2e_vl.tasks.objectives.words import MaskedText, MaskedWords
from e2e_vl.tasks.pretraining import PretrainingTask
from tests.tasks.tiny_pretraining import BOXES, CLASSES, VOCABULARY, make_batch, make_model, make_pairs

SIZES = Sizes(hidden_size=8, vocab_size=5, feature_dim=4, num_classes=6)
OBJECTIVES = {
    "masked_words": MaskedWords(SIZES, MaskedWordsConfig()),
    "masked_text": MaskedText(SIZES, MaskedTextConfig(weight=1.0)),
    "masked_regions": MaskedRegions(SIZES, MaskedRegionsConfig(classes=7)),
    "relationship": Relationship(SIZES, RelationshipConfig(weight=1.0)),
}


def make_task(*names: str, **config) -> PretrainingTask:
    return PretrainingTask(SIZES, PretrainingConfig(**config), {name: OBJECTIVES[name] for name in names})


# Losses


def test_losses_are_means_over_labelled_items():
    objectives = {"masked_words": 0.5, "masked_text": 1.0, "relationship": 2.0}
    model = make_model(teacher="file", objectives=objectives).eval()
    batch = make_batch()
    probabilities = [torch.rand(len(rows), CLASSES).softmax(dim=1) for rows in BOXES]
    probabilities[0][0] *= 0.5  # does not add up to 1: ignored
    batch.region_labels = RegionLabels(class_probs=probabilities)
    labelled = [torch.tensor([True, True, False]), torch.tensor([False, True])]
    batch.masked_regions = RegionMasks(labelled, [torch.zeros(len(rows), dtype=torch.bool) for rows in BOXES])
    output = model(batch)
    counts = {name: float(loss.count) for name, loss in output.losses.items()}
    assert counts == {"masked_words": 2, "masked_text": 1, "masked_regions": 3, "relationship": 3}

    words = model.task.word_head(output.encoded.text, output.encoded.word_embeddings).log_softmax(dim=2)
    expected = -0.5 * (words[0, 1, 9] + words[1, 2, 8]) / 2
    torch.testing.assert_close(output.losses["masked_words"].mean, expected)
    torch.testing.assert_close(output.losses["masked_text"].mean, -words[3, 0, 7])
    regions = model.task.masked_regions.classify(output.encoded.regions).log_softmax(dim=2)
    rows = [(0, 2, probabilities[0][1]), (1, 2, probabilities[0][1]), (2, 2, probabilities[1][1])]
    expected = -sum((regions[text, row] * truth).sum() for text, row, truth in rows) / 3
    torch.testing.assert_close(output.losses["masked_regions"].mean, expected)
    matches = model.task.relationship.head(output.encoded.summary).log_softmax(dim=1)
    expected = -2.0 * (matches[0, 1] + matches[1, 0] + matches[2, 1]) / 3
    torch.testing.assert_close(output.losses["relationship"].mean, expected)


def test_nothing_masked_is_loss_zero_with_gradients():
    model = make_model(region_probability=0.0, objectives={"relationship": 1.0}).train()
    output = model(make_batch(masks=False))
    losses = {name: loss.mean for name, loss in output.losses.items()}
    assert list(losses) == ["masked_words", "masked_text", "masked_regions", "relationship"]
    assert {name for name, loss in losses.items() if loss == 0} == {"masked_words", "masked_text", "masked_regions"}
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


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


def test_only_objectives_of_the_run_have_parameters_and_losses():
    task = make_task("relationship")
    assert {name.partition(".")[0] for name, _ in task.named_parameters()} == {"relationship"}
    assert not task.region_masking.enabled and list(task.objectives) == ["relationship"]
    task = make_task("masked_text", "masked_regions")
    assert {name.partition(".")[0] for name, _ in task.named_parameters()} == {"word_head", "masked_regions"}
    with pytest.raises(ValueError, match="nothing to learn"):
        make_task()


def test_a_text_that_is_not_masked_has_a_record_without_an_error():
    model = make_model(objectives=dict.fromkeys(("masked_text", "masked_regions"), 0.0)).eval()
    batch = make_batch(masks=False)
    with torch.no_grad():
        records = model.task.predict(batch, model(batch))
    assert [record["masked_words"] for record in records] == [0, 0, 0]
    assert model.task.metrics(records) == {} and model.task.correct(records[0]) is None


# Predictions


def test_predictions_count_captions_only():
    model = make_model(region_probability=1.0, objectives={"relationship": 1.0}).eval()
    batch = make_batch()
    with torch.no_grad():
        output = model(batch)
    records = model.task.predict(batch, output)
    assert [record["text_index"] for record in records] == [0, 1, 2]
    assert [record["masked_words"] for record in records] == [1, 1, 0]
    assert [record["masked_regions"] for record in records] == [3, 3, 2]
    assert [record["relationship"] for record in records] == [1, 1, 1]
    regions = [record["masked_regions_choices"] for record in records]
    assert [[choice["place"] for choice in choices] for choices in regions] == [[1, 2, 3], [1, 2, 3], [1, 2]]
    found = [sum(one["chosen"] == one["truth"] for one in choices) for choices in regions]
    assert found == [record["masked_regions_right"] for record in records]
    scores = model.task.metrics(records)
    assert set(scores) == {"masked_words", "masked_regions", "relationship"}
    right = sum(record["masked_regions_right"] for record in records)
    assert scores["masked_regions"] == pytest.approx(right / 8)
    batch.records[1] = {}  # an objective's own text about an image, beside those of the data
    assert [record["text_index"] for record in model.task.predict(batch, output)] == [0, 2]
    nothing = records[0] | dict.fromkeys(model.task.objectives, 0)
    assert model.task.correct(nothing) is None
    assert model.task.describe(nothing | {"sent": ""}).answer == "nothing was hidden"
    assert output.task.logits.shape == (4, 0)
    assert {name: len(logits) for name, logits in output.task.parts.items()} == {
        "masked_words": 2,
        "masked_text": 1,
        "masked_regions": 8,
        "relationship": 3,
    }


def test_what_is_right_is_counted_per_text_and_objective():
    model = make_model(objectives={"relationship": 1.0}, region_probability=0.0).eval()
    for bias in (model.task.word_head.bias, model.task.relationship.head.bias):
        bias.data.fill_(-100.0)
    model.task.word_head.bias.data[9] = model.task.relationship.head.bias.data[0] = 100.0
    batch = make_batch()  # words 9 and 8 of texts 0 and 1; texts 0 and 2 match
    with torch.no_grad():
        records = model.task.predict(batch, model(batch))
    assert [record["masked_words_right"] for record in records] == [1, 0, 0]
    assert [record["relationship_right"] for record in records] == [0, 1, 0]
    assert [model.task.correct(record) for record in records] == [0.5, 0.5, 0.0]
    words = model.task.describe(records[0] | {"sent": "a caption"})
    assert (words.asked, words.answer) == ("a caption", "1 of 1 masked words, 0 of 1 relationship found")
    [[right], [wrong]] = (record["masked_words_choices"] for record in records[:2])
    assert (right["chosen"], right["truth"]) == ("wordpiece 9", "wordpiece 9")  # there is no tokenizer
    assert (wrong["chosen"], wrong["truth"]) == ("wordpiece 9", "wordpiece 8")
    assert words.mistakes == () and words.note == f"masked words: {right['place']}: wordpiece 9"
    words = model.task.describe(records[1] | {"sent": ""})
    assert words.mistakes == (("wordpiece 8 (words)", "wordpiece 9 (words)"),)
    assert words.note == f"masked words: {wrong['place']}: wordpiece 9 instead of wordpiece 8"
    assert model.task.metrics(records) == {"masked_words": 0.5, "relationship": pytest.approx(1 / 3)}


# What the parts must be able to do


def test_an_encoder_needs_what_the_objectives_read():
    assert make_task("masked_words", "masked_text").needs == (Ability.WORD_EMBEDDINGS,)
    assert make_task("relationship", mask_pixels=False).needs == (Ability.SUMMARY_OF_SINGLE,)
    assert make_task("masked_regions").needs == (Ability.MASKED_REGIONS,)
    hidden = make_task("masked_words", "masked_regions", mask_pixels=False).needs
    assert hidden == (Ability.WORD_EMBEDDINGS, Ability.MASKED_REGIONS, Ability.MASKED_FEATURES)


def test_the_rule_of_hiding_follows_the_settings():
    assert make_task("masked_regions").region_masking == RegionMasking()  # both have the official defaults
    changed = make_task("masked_regions", teacher="file", masked_pixels="black", max_length=None).region_masking
    assert changed == RegionMasking(teacher="file", colour="black", max_length=None, background_first=True)
    changed = make_task("masked_words", mask_pixels=False, background="first", max_detected_regions=None).region_masking
    assert changed == RegionMasking(enabled=False, pixels=False, background_first=True, max_detected_regions=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objectives": {"masked_regions": {"classes": 7}}}, "classes is 7, but the detector has 4 classes"),
        ({"mask_pixels": False}, "encoder.config.masked_region_feature to true"),
        ({"objectives": {"masked_words": -1}}, "objectives.masked_words.weight is -1.0; it must not be negative"),
        ({"objectives": {"masked_verbs": 1}}, "task.config.objectives has the unknown key 'masked_verbs'"),
        (
            {"objectives": {"masked_words": {"rate": 1}}},
            "masked_words has the unknown key 'rate'",
        ),
        (
            {"encoder": {"masked_region_embedding": False}},
            "encoder.config.masked_region_embedding to true, or region_word to img",
        ),
        (
            {"encoder": {"with_pooler": False}, "objectives": {"relationship": 1.0}},
            "encoder.config.with_pooler to true",
        ),
        ({"region_probability": 1.5}, "must be from 0 to 1"),
        ({"max_length": 2}, "need 3"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_messages_name_an_objective_as_settings_do():
    assert {name: part.config_class.name for name, part in BUILDABLE.items()} == {name: name for name in BUILDABLE}


def test_objectives_need_their_data():
    detector = types.SimpleNamespace(num_classes=6)

    def check(*names: str, corpus: object = "corpus", images: int = 2) -> None:
        facts = types.SimpleNamespace(corpus=corpus, groups=[[0]] * images)
        make_task(*names).check_data(facts, detector)

    check(*OBJECTIVES)
    check("masked_words", corpus=None, images=1)
    with pytest.raises(ValueError, match=r"masked_text has the weight 1.0, but the data have no .*masked_text=0"):
        check(*OBJECTIVES, corpus=None)
    with pytest.raises(ValueError, match="need at least two images"):
        check("relationship", images=1)
    detector.num_classes = 5
    with pytest.raises(ValueError, match=r"masked_regions\.classes is 7, but the detector has 5 classes"):
        check("masked_regions")


def test_vocabulary_of_the_head_is_that_of_the_encoder():
    model = make_model()
    assert model.task.word_head.bias.shape == (VOCABULARY,)

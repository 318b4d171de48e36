"""Phrase grounding: losses, detected phrases, records."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from detector.structures import Regions
from e2e_vl.phrases import PhraseBatch
from e2e_vl.predictions import Prediction
from e2e_vl.structures import EncoderOutput, IntermediateStates, ModelOutput, TaskOutput, gather_regions
from e2e_vl.targets import Ragged
from e2e_vl.tasks.phrase_head import (
    FIRST,
    INSIDE,
    PhraseHead,
    add_grounded_phrases,
    find_spans,
    grounding_metrics,
    predicted_spans,
    word_level_tags,
)
from tests.tasks.batches import make_batch

HIDDEN, LENGTH = 6, 5
REGIONS = torch.tensor([[0.0, 0, 60, 60], [0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 40], [0, 5, 10, 15]])
PLACES = [[0, 0], [0, 3], [4, 8], [9, 13], [0, 0]]  # of "the star here" between two special wordpieces


def make_phrases(
    spans=(((1, 3), (3, 4)), ()), boxes=(((0, 0, 10, 10), (20, 20, 30, 39)), ()), complete=(True, False)
) -> PhraseBatch:
    """Two texts; by default the first has a phrase that names two regions, and one whose boxes are unknown."""
    counts = torch.tensor([len(own) for own in spans])
    rows = [span for own in spans for span in own]
    return PhraseBatch(
        words=["the star here"] * len(spans),
        offsets=torch.tensor([PLACES] * len(spans)),
        continues_word=torch.zeros(len(spans), len(PLACES), dtype=torch.bool),
        spans=Ragged(torch.tensor(rows, dtype=torch.int64).reshape(-1, 2), counts),
        boxes=Ragged(
            torch.tensor([box for own in boxes for box in own], dtype=torch.float32).reshape(-1, 4),
            torch.tensor([len(own) for own in boxes], dtype=torch.int64),
        ),
        is_complete=torch.tensor(complete),
    )


def run(head: PhraseHead, phrases: PhraseBatch, boxes: torch.Tensor = REGIONS) -> ModelOutput:
    torch.manual_seed(1)
    index, size = [[0]] * len(phrases.words), {"sizes": [[60, 80]], "original_sizes": [[120, 160]]}
    batch = make_batch(index, **size, length=LENGTH, phrases=phrases)
    regions = Regions([boxes], [torch.randn(len(boxes), 3)], [torch.zeros(len(boxes), 2)])
    gathered = gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=True)
    states = IntermediateStates(
        torch.randn(len(batch), LENGTH, HIDDEN, requires_grad=True),
        torch.randn(*gathered.attention_mask.shape, HIDDEN, requires_grad=True),
    )
    encoded = EncoderOutput(states.text, states.regions, intermediate=dict.fromkeys(head.layers, states))
    task = TaskOutput({}, torch.zeros(1))
    return ModelOutput(task, regions, gathered, encoded, batch, None, head(batch, gathered, encoded.intermediate))


def make_head(phrase_state: str = "last", *, training: bool = True) -> PhraseHead:
    torch.manual_seed(0)
    return PhraseHead(HIDDEN, 4, 2, phrase_state).train(training)


def test_the_loss_is_the_divergence_from_equal_shares_of_the_named_regions():
    """The first phrase names two regions; the second one none that is there, and does not contribute to the loss."""
    output = run(make_head(), make_phrases(boxes=(((0, 0, 10, 10), (20, 20, 30, 39)), ((50, 50, 55, 55),))))
    log, loss = output.phrases.log_attention, output.phrases.losses["phrases"]
    assert log.shape == (2, 5) and (log[:, 0] == -torch.inf).all()  # the whole image is no answer
    torch.testing.assert_close(log.exp().sum(dim=1), torch.ones(2))
    assert loss.count == 1
    torch.testing.assert_close(loss.total, (math.log(0.5) - log[0, 1] + math.log(0.5) - log[0, 3]) / 2)
    assert {"phrases", "phrase_tags"} == set(output.losses) == set(output.task_losses)
    loss.mean.backward()
    text, regions = output.encoded.intermediate[2].text.grad, output.encoded.intermediate[2].regions.grad
    assert [bool(row.any()) for row in text[0]] == [False, False, True, False, False]  # its last wordpiece asks
    assert regions[0, 1:].any() and not regions[0, 0].any() and not regions[1].any() and not text[1].any()


@pytest.mark.parametrize(
    ("phrase_state", "asks"), [("last", [2]), ("first", [1]), ("mean", [1, 2])], ids=["last", "first", "mean"]
)
def test_a_phrase_asks_with_its_wordpieces(phrase_state, asks):
    boxes = (((0, 0, 10, 10), (20, 20, 30, 39)), ((50, 50, 55, 55),))  # the second phrase has no region
    output = run(make_head(phrase_state), make_phrases(boxes=boxes))
    output.phrases.losses["phrases"].mean.backward()
    gradient = output.encoded.intermediate[2].text.grad[0]
    assert gradient.any(dim=1).nonzero().flatten().tolist() == asks
    torch.testing.assert_close(gradient[asks[0]], gradient[asks[-1]])  # with equal shares


def test_the_short_path_asks_the_inputs_of_the_encoder_and_leaves_the_phrases_alone():
    boxes = (((0, 0, 10, 10), (20, 20, 30, 39)), ((50, 50, 55, 55),))  # the second phrase has no region
    torch.manual_seed(0)
    head = PhraseHead(HIDDEN, 4, 2, has_short_path=True).train()
    output = run(head, make_phrases(boxes=boxes))
    plain = run(make_head(), make_phrases(boxes=boxes))
    torch.testing.assert_close(output.phrases.log_attention, plain.phrases.log_attention)
    loss = output.phrases.losses["short_path"]
    assert head.layers == (0, 2)
    assert loss.count == 1
    loss.mean.backward()
    asking = output.encoded.intermediate[0].text.grad[0].any(dim=1)
    assert asking.tolist() == [False, True, True, False, False]  # the mean of the phrase's words
    assert head.query.weight.grad is None
    assert head.short_path.query.weight.grad.any()


def test_tags_are_learned_only_where_all_phrases_are_known():
    head = make_head()
    output = run(head, make_phrases())
    loss = output.phrases.losses["phrase_tags"]
    tags = head.tags(output.encoded.intermediate[2].text)[0, 1:4].log_softmax(dim=1)
    assert loss.count == 3  # words of the first text
    torch.testing.assert_close(loss.total, -(tags[0, FIRST] + tags[1, INSIDE] + tags[2, FIRST]))
    assert run(head, make_phrases(complete=(False, False))).phrases.losses["phrase_tags"].count == 0


def test_without_regions_or_phrases_there_is_no_nan():
    for phrases in (make_phrases(), make_phrases(spans=((), ()), boxes=((), ()))):
        output = run(make_head(), phrases, REGIONS[:1])
        total = sum(loss.mean for loss in output.losses.values())
        total.backward()
        assert torch.isfinite(total) and torch.isfinite(output.encoded.intermediate[2].text.grad).all()


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ([0, FIRST, INSIDE, FIRST, 0], [(1, 3), (3, 4)]),
        ([0, INSIDE, INSIDE, 0, INSIDE], [(1, 3)]),  # the last one is no word
        ([FIRST, 0, FIRST, FIRST, FIRST], [(2, 3), (3, 4)]),
        ([0] * 5, []),
    ],
)
def test_runs_of_tags_make_phrases(tags, spans):
    is_word = torch.tensor([[False, True, True, True, False]])
    assert find_spans(torch.tensor([tags]), is_word) == [spans]


def head_that_finds_all() -> PhraseHead:
    """It tags every word as the inside of a phrase."""
    head = make_head(training=False)
    with torch.no_grad():
        head.tags.weight.zero_()
        head.tags.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    return head


def test_phrases_are_found_where_none_is_annotated_and_only_outside_training():
    head = head_that_finds_all()
    output = run(head, make_phrases())
    assert output.phrases.spans.counts.tolist() == [2, 1]
    assert output.phrases.spans.values[2].tolist() == [1, 4]
    assert output.phrases.log_attention.shape[0] == 3 and output.phrases.is_correct.shape[0] == 2
    complete = run(head, make_phrases(complete=(True, True)))
    assert complete.phrases.spans.counts.tolist() == [2, 0]  # the second text has no phrase
    assert run(head.train(), make_phrases()).phrases.spans.counts.tolist() == [2, 0]


def test_a_text_is_one_phrase_unless_the_head_was_trained_to_find_phrases():
    """As on RefCOCO without files of phrases: the whole expression names its object."""
    head = make_head()
    learn(head, make_phrases(complete=(False, False)))
    assert not head.finds_phrases
    found = run(head.eval(), make_phrases(spans=((), ()), boxes=((), ()), complete=(False, False))).phrases
    assert found.spans.values.tolist() == [[1, 4], [1, 4]] and found.spans.counts.tolist() == [1, 1]
    learn(head.train(), make_phrases())
    assert head.finds_phrases


def learn(head: PhraseHead, phrases: PhraseBatch) -> None:
    """A training step."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    sum(loss.total for loss in run(head, phrases).phrases.losses.values()).backward()
    optimizer.step()


def test_records_hold_phrases_in_pixels_of_the_original_image():
    head = head_that_finds_all()
    output = run(head, make_phrases(boxes=(((0, 0, 10, 10), (20, 20, 30, 39)), ((50, 50, 55, 55),))))
    output.batch.records = [{"a": 1}, {"a": 2}]
    first, second = add_grounded_phrases(output).batch.records
    assert "grounded" not in output.batch.records[0]
    assert first["a"] == 1 and [phrase.text for phrase in first["grounded"]] == ["the star", "here"]
    best = output.phrases.log_attention.argmax(dim=1)
    for phrase, row in zip(first["grounded"], best[:2], strict=True):
        assert phrase.box == tuple((REGIONS[row] * 2).tolist())  # the image is twice as large
    right = output.phrases.is_correct
    assert [phrase.correct for phrase in first["grounded"]] == [bool(right[n, best[n]]) for n in range(2)]
    [found] = second["grounded"]
    assert found.text == "the star here" and found.characters == (0, 13) and found.correct is None
    predictions = [Prediction(grounded=tuple(record["grounded"])) for record in (first, second)]
    metrics = grounding_metrics(predictions)
    assert metrics == {"phrase_accuracy": sum(bool(right[n, best[n]]) for n in range(2)) / 2}
    assert grounding_metrics(predictions[1:]) == {}


def test_a_text_without_regions_points_at_nothing():
    output = run(make_head(training=False), make_phrases(), REGIONS[:1])
    output.batch.records = [{"a": 1}, {}]
    [first, second] = add_grounded_phrases(output).batch.records
    assert second == {}  # such as a text of a corpus, of which nothing is predicted
    assert [(phrase.box, phrase.score) for phrase in first["grounded"]] == [(None, 0.0)] * 2


@pytest.mark.parametrize(
    ("scores", "continues", "tags"),
    [
        # the second word has two pieces, of which the second one alone would end the phrase
        ([[0, 0, 3], [0, 2, 0], [1, 0, 0]], [0, 0, 1], [FIRST, INSIDE, INSIDE]),
        ([[0, 0, 3], [0, 1, 0], [2, 0, 0]], [0, 0, 1], [FIRST, 0, 0]),
        # the second piece alone would begin another phrase
        ([[0, 0, 3], [0, 0.1, 0], [0, 0, 3]], [0, 1, 1], [FIRST, INSIDE, INSIDE]),
        ([[0, 0, 3], [0, 0, 1], [0, 0, 3]], [0, 0, 0], [FIRST, FIRST, FIRST]),
    ],
)
def test_tags_are_those_of_whole_words(scores, continues, tags):
    found = word_level_tags(torch.tensor([scores], dtype=torch.float32), torch.tensor([continues], dtype=torch.bool))
    assert found.tolist() == [tags]


def test_found_phrases_have_no_punctuation_at_their_ends():
    places = [[[0, 0], [0, 1], [1, 2], [3, 7], [7, 8], [8, 9]], [[0, 0], [0, 1], [1, 2], [0, 0], [0, 0], [0, 0]]]
    none = make_phrases(spans=((), ()), boxes=((), ()))
    phrases = dataclasses.replace(
        none,
        words=['"a star".', "!?"],
        offsets=torch.tensor(places),
        continues_word=torch.zeros(2, 6, dtype=torch.bool),
    )
    inside = torch.tensor([0.0, 1, 0]).expand(2, 6, 3)
    assert predicted_spans(inside, phrases) == [[(2, 4)], []]

"""Flickr30K Entities: spans of phrases, labels, the loss of the official code, and predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from detector.structures import Regions
from e2e_vl.samples import EntityPhrases, Question, SampleText
from e2e_vl.structures import Batch, EncoderOutput, ModelOutput, gather_regions
from e2e_vl.tasks.config import Flickr30KConfig
from e2e_vl.tasks.flickr30k import Flickr30KTargets, Flickr30KTask, first_occurrence
from e2e_vl.text import TextTokenizer
from tests.tasks.batches import make_batch
from tests.tasks.preprocessors import photo, preprocess, sample_of, tokens

HIDDEN, LENGTH = 6, 5
BOXES = torch.tensor([[0.0, 0, 10, 10], [5.0, 0, 15, 10], [20.0, 20, 30, 40], [0.0, 5, 10, 15]])
FIRST = [np.array([[0, 0, 10, 10], [20, 20, 30, 39]]), np.array([[50, 50, 60, 60]])]  # the second names no region
SECOND = [np.array([[20, 20, 30, 30]])]  # IoU exactly 0.5 with region 2
SPANS = [np.array([[1, 3], [3, 4]]), np.array([[2, 3]])]


def make_task(**config) -> Flickr30KTask:
    torch.manual_seed(0)
    return Flickr30KTask(HIDDEN, Flickr30KConfig(**{"head_size": 4} | config))


def sentences(*boxes: list[np.ndarray] | None, spans=SPANS, scale: float = 1.0) -> Batch:
    texts = [
        Flickr30KTargets(own, None if some is None else [one.astype(np.float32) * scale for one in some])
        for own, some in zip(spans, boxes, strict=True)
    ]
    records = [{"phrases": [f"p{n}" for n in range(len(own))]} for own in spans]
    for record, some in zip(records, boxes, strict=True):
        if some is not None:
            record |= {"gt_boxes": [one.tolist() for one in some], "phrase_types": [["people"]] * len(some)}
    return make_batch(
        [[0]] * len(texts),
        sizes=[[int(60 * scale), int(80 * scale)]],
        original_sizes=[[60, 80]],
        length=LENGTH,
        targets=Flickr30KTargets.join(texts),
        records=records,
    )


def run(task: Flickr30KTask, batch: Batch, boxes: torch.Tensor = BOXES, *, whole: bool = False) -> ModelOutput:
    torch.manual_seed(1)
    regions = Regions([boxes], [torch.randn(len(boxes), 3)], [torch.zeros(len(boxes), 2)])
    gathered = gather_regions(regions, batch.images.sizes, batch.image_index, whole_image=whole)
    text = torch.randn(len(batch), LENGTH, HIDDEN, requires_grad=True)
    states = torch.randn(*gathered.attention_mask.shape, HIDDEN)
    encoded = EncoderOutput(text, states, None)
    return ModelOutput(task(batch, gathered, encoded), regions, gathered, encoded, batch)


def test_the_loss_is_the_divergence_from_equal_shares_per_sentence():
    task, batch = make_task(), sentences(FIRST, SECOND)
    output = run(task, batch)
    log = output.task.logits
    assert log.shape == (3, 4)
    torch.testing.assert_close(log.exp().sum(dim=1), torch.ones(3))
    expected = (math.log(0.5) - log[0, 0] + math.log(0.5) - log[0, 2]) / 2 - log[2, 2]
    loss = output.task.losses["flickr30k"]
    assert loss.count == 2
    torch.testing.assert_close(loss.total, expected)
    per_phrase = run(make_task(loss_per="phrase"), batch).task.losses["flickr30k"]
    assert per_phrase.count == 2 and torch.isclose(per_phrase.total, loss.total)
    loss.mean.backward()
    grad = output.encoded.text.grad
    assert grad[0, 2].any() and grad[1, 2].any() and not grad[0, 3].any() and not grad[:, :2].any()  # last wordpieces


def test_the_loss_is_divided_by_sentences_with_phrases_or_by_phrases():
    """A sentence that only has phrases of another kind is none of this task's."""
    spans = [SPANS[0], np.zeros((0, 2), dtype=np.int64)]
    for kind, count in (("text", 1), ("phrase", 2)):
        batch = sentences([FIRST[0], SECOND[0]], [], spans=spans)
        batch.targets.has_target = torch.tensor([True, False])
        assert run(make_task(loss_per=kind), batch).task.losses["flickr30k"].count == count


def test_several_heads_are_averaged():
    for heads in (1, 3):
        task = make_task(num_heads=heads)
        output = run(task, sentences(FIRST, SECOND))
        query = task.query(output.encoded.text[[0, 0, 1], [2, 3, 2]]).view(3, heads, 4)
        key = task.key(output.encoded.regions)[[0, 0, 1]].view(3, 4, heads, 4)
        shares = (torch.einsum("phd,prhd->phr", query, key) / 2).softmax(dim=2).mean(dim=1)
        torch.testing.assert_close(output.task.logits.exp(), shares)


@pytest.mark.parametrize(("state", "used"), [("last", {2, 3}), ("first", {1, 3}), ("mean", {1, 2, 3})])
def test_which_state_of_a_phrase_is_the_query(state, used):
    output = run(make_task(phrase_state=state), sentences(FIRST, SECOND))
    output.task.logits[:2, 0].sum().backward()
    grad = output.encoded.text.grad[0]
    assert {place for place in range(LENGTH) if grad[place].abs().sum() > 1e-7} == used


NO_BOX = [np.zeros((0, 4))]


@pytest.mark.parametrize(
    ("boxes", "batch", "has_loss"),
    [
        (BOXES[:0], sentences(FIRST, SECOND), False),
        (BOXES[1:2], sentences(FIRST, SECOND), True),  # none of them is right
        (BOXES, sentences(NO_BOX, NO_BOX, spans=SPANS[1:] * 2), False),
    ],
)
def test_texts_without_regions_or_without_right_ones_have_no_gradient_problem(boxes, batch, has_loss):
    output = run(make_task(), batch, boxes)
    loss = output.task.losses["flickr30k"]
    loss.mean.backward()
    assert loss.count == 2 and (has_loss or loss.total == 0)
    assert torch.isfinite(output.encoded.text.grad).all()


def test_without_regions_nothing_is_predicted():
    task, batch = make_task(), sentences(FIRST, SECOND)
    [record, _] = task.predict(run(task, batch, BOXES[:0]))
    assert record.boxes == (None, None) == record.ranks and record.scores == (0, 0)
    assert "no candidate regions" in task.answer_lines(record)[0]


def test_the_whole_image_wins_only_where_it_may():
    batch = sentences(FIRST, SECOND)
    boxes = torch.cat([torch.tensor([[0.0, 0, 80, 60]]), BOXES])
    first = run(make_task(), batch, boxes, whole=True).task.logits
    assert (first[:, 0] == -torch.inf).all() and torch.isfinite(first[:, 1:]).all()
    assert torch.isfinite(run(make_task(whole_image_can_win=True), batch, boxes, whole=True).task.logits).all()
    assert torch.isfinite(run(make_task(), batch, boxes[:1], whole=True).task.logits).all()


def test_predictions_are_in_pixels_of_the_original_image():
    task, batch = make_task(), sentences(FIRST, SECOND, scale=2.0)
    output = run(task, batch, BOXES * 2)
    output.task.logits = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1]]).log()
    first, second = task.predict(output)
    assert first.boxes == ((5, 0, 15, 10), (0, 0, 10, 10)) and first.ranks == (1, None)
    assert second.boxes == ((20, 20, 30, 40),) and second.ranks == (0,)
    assert first.scores == pytest.approx([0.6, 0.7])
    assert (task.correctness(first), task.correctness(second)) == (0, 1)
    metrics = task.metrics([first, second])
    assert metrics["accuracy"] == pytest.approx(1 / 3) and metrics["ceiling"] == pytest.approx(2 / 3)
    described = task.describe(first)
    assert described.note == "0 of 2 phrases are right, 1 have no right candidate" and described.group == "people"
    assert described.mistakes == (("people", "another region"), ("people", "no right candidate"))
    unknown = sentences(None, None)
    [record, _] = task.predict(run(task, unknown))
    assert record.ranks is None and task.correctness(record) is None and task.metrics([record]) == {"count": 1}


def encode(tokenizer, text: str, *spans: tuple[int, int], image=None, config=None, **text_tokenizer):
    boxes = tuple(np.array([[10.0, 20, 30, 40]]) for _ in spans)
    task = make_task(**config or {})
    truth = EntityPhrases(spans, boxes, entities=("1",) * len(spans), types=(("people",),) * len(spans))
    sample = sample_of(SampleText(0, text, {}, truth))
    [found] = preprocess(task.preprocessor(TextTokenizer(tokenizer, **text_tokenizer)), sample, image)
    return found


def test_phrases_are_found_by_their_characters(tokenizer):
    found = encode(tokenizer, "The man  and a red shirt.", (0, 7), (13, 24))
    assert tokens(found, tokenizer) == ["[CLS]", "the", "man", "and", "a", "red", "shirt", ".", "[SEP]"]
    assert found.targets.spans.tolist() == [[1, 3], [4, 7]]
    assert found.record["phrases"] == ["The man", "a red shirt"] and found.record["phrase_ids"] == ["1", "1"]
    assert [boxes.tolist() for boxes in found.targets.boxes] == [[[10, 20, 30, 40]]] * 2


def test_the_first_place_of_equal_words_wins_as_in_the_official_code(tokenizer):
    text = "the man and the man"
    assert encode(tokenizer, text, (12, 19)).targets.spans.tolist() == [[1, 3]]
    assert encode(tokenizer, text, (12, 19), config={"occurrence": "own"}).targets.spans.tolist() == [[4, 6]]
    assert first_occurrence("The man and the man", (12, 19)) == (12, 19), "capital letters count"
    assert first_occurrence("the mango and the man", (14, 21)) == (14, 21), "whole words only"


def test_phrases_that_are_cut_off_read_the_last_wordpiece_before_them(tokenizer):
    found = encode(tokenizer, "the man and a red shirt", (0, 7), (12, 23), (8, 11), max_length=4)
    assert tokens(found, tokenizer) == ["[CLS]", "the", "man", "[SEP]"]
    assert found.targets.spans.tolist() == [[1, 3], [2, 3], [2, 3]]
    assert encode(tokenizer, "the man", (0, 7), is_blank=True).targets.spans.tolist() == [[0, 1]]


def test_a_mirrored_image_moves_boxes_and_words(tokenizer):
    found = encode(tokenizer, "the man left of a shirt", (0, 7), image=photo(flipped=True))
    assert tokens(found, tokenizer)[3] == "right"
    assert found.targets.boxes[0].tolist() == [[69, 20, 89, 40]]


def phrases_of(text: SampleText) -> list[str]:
    return [text.words[slice(*span)] for span in text.truth.spans]


def test_a_user_puts_phrases_in_brackets(tokenizer, tmp_path):
    task = make_task()
    sample = task.question(Question(tmp_path / "a.jpg", "[the man] and [a red shirt]"))
    [text] = sample.texts
    assert text.words == "the man and a red shirt" and phrases_of(text) == ["the man", "a red shirt"]
    [found] = preprocess(task.preprocessor(TextTokenizer(tokenizer)), sample)
    assert found.targets.spans.tolist() == [[1, 3], [4, 7]] and found.targets.boxes is None
    assert phrases_of(task.question(Question(tmp_path / "a.jpg", "a shirt")).texts[0]) == ["a shirt"]


def test_small_shares_keep_their_order():
    """In float32 they would all be zero, and the first region would win."""
    task, batch = make_task(), sentences(SECOND, spans=SPANS[1:])
    output = run(task, batch)
    output.task.logits = torch.tensor([[-200.0, -190.0, -150.0, 0.0]])
    [found] = task.predict(output)
    assert found.ranks == (1,)

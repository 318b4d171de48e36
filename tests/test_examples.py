from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from e2e_vl.examples import (
    ImageExample,
    ImageTransform,
    PhraseBatch,
    Ragged,
    Targets,
    TextExample,
    by_name,
    nested,
    per_wordpiece,
    ragged,
    stacked,
)
from e2e_vl.region_masking import truncate_texts
from e2e_vl.samples import PhraseBoxes, SampleText
from e2e_vl.structures import TextBatch
from e2e_vl.tasks.refcoco import ReferringPreprocessor
from e2e_vl.text import TextTokenizer
from tests.tasks.preprocessors import make_tokenizer, photo, preprocess, sample_of

TWICE = ImageTransform(original_size=(40, 50), size=(80, 100))
MIRRORED = ImageTransform(original_size=(40, 50), size=(80, 100), flipped=True)


def test_boxes_are_scaled_and_flipped_on_the_last_pixel():
    np.testing.assert_array_equal(TWICE.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[2, 4, 22, 45]])
    np.testing.assert_array_equal(MIRRORED.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[99 - 22, 4, 99 - 2, 45]])


def test_clamping_goes_to_the_last_pixel_after_resize_and_flip():
    whole = np.array([[0, 0, 50, 40], [-3, -4, 10, 99]])
    np.testing.assert_array_equal(TWICE.transform_and_clamp_boxes(whole, "x"), [[0, 0, 99, 79], [0, 0, 20, 79]])
    np.testing.assert_array_equal(MIRRORED.transform_and_clamp_boxes(whole, "x"), [[0, 0, 99, 79], [79, 0, 99, 79]])
    assert TWICE.transform_and_clamp_boxes(whole, "x").dtype == np.float32


def test_a_box_on_the_last_pixel_keeps_an_area():
    same = ImageTransform(original_size=(40, 50), size=(40, 50))
    boxes = same.transform_and_clamp_boxes(np.array([[49, 39, 50, 40], [49.5, 0, 50, 40], [-5, 0, 0.25, 1]]), "x")
    np.testing.assert_array_equal(boxes, [[48, 38, 49, 39], [48, 0, 49, 39], [0, 0, 0.25, 1]])
    flipped = ImageTransform((40, 50), (40, 50), flipped=True).transform_and_clamp_boxes(
        np.array([[49.5, 0, 50, 9]]), "x"
    )
    np.testing.assert_array_equal(flipped, [[0, 0, 1, 9]])
    tiny = ImageTransform((1, 1), (1, 1)).transform_and_clamp_boxes(np.array([[0, 0, 1, 1]]), "x")
    np.testing.assert_array_equal(tiny, [[0, 0, 1, 1]])


@pytest.mark.parametrize("box", [[50, 0, 60, 10], [0, 40, 5, 60], [-9, 0, 0, 10], [0, -9, 5, 0]])
def test_a_box_outside_the_image_is_an_error(box):
    with pytest.raises(ValueError, match=r"dets\.json: image 7: box 1 "):
        TWICE.transform_and_clamp_boxes(np.array([[0, 0, 5, 5], box]), "dets.json: image 7")


def test_targets_of_the_detector_are_mirrored_on_the_border_and_clipped():
    """x' = width - x as in Detectron2, so both borders stay on the edges of the object's pixels."""
    boxes = np.array([[1, 2, 11, 22.5], [-3, -4, 60, 99]])
    np.testing.assert_array_equal(TWICE.transform_objects(boxes), [[2, 4, 22, 45], [0, 0, 100, 80]])
    np.testing.assert_array_equal(MIRRORED.transform_objects(boxes), [[78, 4, 98, 45], [0, 0, 100, 80]])
    assert MIRRORED.transform_objects(boxes).dtype == np.float32


def test_without_boxes_nothing_about_the_boxes_is_left():
    image = ImageExample(
        np.zeros((4, 6, 3), dtype=np.uint8),
        TWICE,
        "photo",
        boxes=np.ones((2, 4), dtype=np.float32),
        box_ids=(1, 2),
        box_classes=np.array([0, 1]),
        class_probs=np.ones((2, 3), dtype=np.float32),
        roi_masks=np.ones((2, 7, 7), dtype=np.float32),
        features=np.ones((2, 5), dtype=np.float32),
        image_feature=np.ones(5, dtype=np.float32),
    )
    emptied = image.without_boxes()
    shapes = [rows.shape for rows in (emptied.boxes, emptied.box_classes, emptied.class_probs, emptied.features)]
    assert shapes == [(0, 4), (0,), (0, 3), (0, 5)]
    assert emptied.roi_masks.shape == (0, 7, 7)
    assert emptied.box_ids is None and emptied.image_feature is image.image_feature
    assert len(image.boxes) == 2, "the image itself stays as it is"
    proposed = ImageExample(image.pixels, TWICE, "photo")
    assert proposed.without_boxes() is proposed


# Targets


@dataclasses.dataclass
class Some(Targets):
    box: Tensor | None = stacked()
    number: Tensor | None = stacked()


@dataclasses.dataclass
class Words(Targets):
    labels: Tensor | None = per_wordpiece()
    kinds: Tensor | None = per_wordpiece(fill=0)
    number: Tensor | None = stacked()


@dataclasses.dataclass
class Phrases(Targets):
    """Several phrases per text, several boxes per phrase."""

    spans: Ragged | None = ragged()  # int64 [n, 2] per text
    boxes: Ragged | None = nested()  # a list of float32 [n, 4] per text


@dataclasses.dataclass
class Parts(Targets):
    parts: dict[str, Targets] | None = by_name()


def spans(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def boxes(number: int, value: float = 1.0) -> np.ndarray:
    return np.full((number, 4), value, dtype=np.float32)


# One shape per text


def test_values_of_one_shape_are_stacked():
    joined = Some.join([Some(np.arange(4, dtype=np.float32) + row, np.int64(row)) for row in range(3)])
    assert isinstance(joined, Some)
    assert joined.box.shape == (3, 4) and joined.box.dtype == torch.float32
    assert joined.box[:, 0].tolist() == [0, 1, 2]
    assert joined.number.tolist() == [0, 1, 2] and joined.number.dtype == torch.int64


# A value per wordpiece


def test_labels_of_wordpieces_are_padded_with_their_fill():
    joined = Words.join([Words(np.array([5, -1, 6]), np.array([1, 2, 3])), Words(np.array([7]), np.array([4]))])
    assert joined.labels.tolist() == [[5, -1, 6], [7, -1, -1]]
    assert joined.kinds.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert joined.labels.dtype == torch.int64
    empty = Words.join([Words(labels=np.zeros(0, dtype=np.int64)), Words(labels=np.array([3]))])
    assert empty.labels.tolist() == [[-1], [3]]


def test_targets_are_cut_with_their_texts():
    """The first wordpieces and the very last stay, as in `truncate_texts`."""
    joined = Words.join(
        [
            Words(np.array([5, -1, 6, 7, 8]), np.array([1, 2, 3, 4, 5]), 10),
            Words(np.array([9, 3]), np.array([6, 7]), 11),
            Words(np.array([1, 2, 3]), np.array([8, 9, 1]), 12),
        ]
    )
    attention_mask = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    texts = TextBatch(
        torch.arange(15).view(3, 5) * attention_mask, torch.zeros(3, 5, dtype=torch.int64), attention_mask
    )
    shortened, index = truncate_texts(texts, torch.tensor([3, 2, 2]))
    cut = joined.truncate(index, shortened.attention_mask)
    assert cut.labels.tolist() == [[5, -1, 8], [9, 3, -1], [1, 3, -1]]
    assert cut.kinds.tolist() == [[1, 2, 5], [6, 7, 0], [8, 1, 0]]
    assert cut.number.tolist() == [10, 11, 12]
    assert joined.labels.shape == (3, 5), "a copy"
    parts = Parts({"words": joined, "some": Some(number=torch.tensor([1, 2, 3]))}).truncate(
        index, shortened.attention_mask
    )
    assert parts.parts["words"].labels.tolist() == cut.labels.tolist()
    assert parts.parts["some"].number.tolist() == [1, 2, 3]
    assert Words().truncate(index, shortened.attention_mask) == Words()


# Lists of different lengths


def test_lists_per_text_are_joined_and_split_again():
    joined = Phrases.join([Phrases(spans((0, 3), (4, 9))), Phrases(spans()), Phrases(spans((1, 2)))])
    assert joined.spans.values.tolist() == [[0, 3], [4, 9], [1, 2]]
    assert joined.spans.values.dtype == torch.int64
    assert joined.spans.counts.tolist() == [2, 0, 1]
    assert joined.spans.owner.tolist() == [0, 0, 2]
    assert [rows.tolist() for rows in joined.spans.split()] == [[[0, 3], [4, 9]], [], [[1, 2]]]


def test_several_phrases_per_text_and_several_boxes_per_phrase():
    texts = [
        Phrases(spans((0, 3), (4, 9)), [boxes(2, 1), boxes(0)]),  # the second phrase names nothing in the image
        Phrases(spans(), []),
        Phrases(spans((1, 2), (3, 4), (5, 6)), [boxes(1, 2), boxes(3, 3), boxes(1, 4)]),
    ]
    joined = Phrases.join(texts)
    assert joined.spans.counts.tolist() == [2, 0, 3]
    assert joined.boxes.counts.tolist() == [2, 0, 1, 3, 1], "a list per phrase, text by text"
    assert joined.boxes.values.shape == (7, 4) and joined.boxes.values.dtype == torch.float32
    assert joined.boxes.owner.tolist() == [0, 0, 2, 3, 3, 3, 4]
    text_of_box = joined.spans.owner[joined.boxes.owner]
    assert text_of_box.tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert [len(rows) for rows in joined.boxes.split()] == [2, 0, 1, 3, 1]
    assert [float(rows[0, 0]) for rows in joined.boxes.split() if len(rows)] == [1, 2, 3, 4]
    # phrase p of text t is found again
    per_text = [list(joined.boxes.split())[2:], texts[2].boxes]
    for found, expected in zip(*per_text, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)


# Parts of a task that is a sum


def test_parts_are_joined_by_name():
    texts = [Parts({"some": Some(number=row), "words": Words(np.arange(row + 1))}) for row in range(3)]
    joined = Parts.join(texts)
    assert list(joined.parts) == ["some", "words"]
    assert joined.parts["some"].number.tolist() == [0, 1, 2] and joined.parts["some"].box is None
    assert joined.parts["words"].labels.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert joined.labelled_wordpieces(1) == [0, 1]


def test_targets_move_to_a_device_with_all_their_parts():
    joined = Parts.join([Parts({"phrases": Phrases(spans((0, 3)), [boxes(2)]), "some": Some(number=1)})])
    moved = joined.to("meta").parts
    assert moved["some"].number.is_meta
    assert moved["phrases"].boxes.values.is_meta and moved["phrases"].spans.counts.is_meta
    assert not joined.parts["some"].number.is_meta


# Texts without any target


def test_texts_without_a_target_are_told_apart():
    joined = Some.join([Some(np.ones(4), 3), Some(np.zeros(4), -1, has_target=False), Some(np.ones(4), 5)])
    assert joined.has_target.tolist() == [True, False, True] and joined.number.tolist() == [3, -1, 5]
    assert joined.with_target(joined.number).tolist() == [3, 5]
    assert joined.to("meta").has_target.is_meta
    cut = joined.truncate(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool))
    assert cut.has_target.tolist() == [True, False, True]
    none = Some.join([Some(number=0, has_target=False)] * 2)
    assert none.has_target.tolist() == [False, False] and none.with_target(none.number).shape == (0,)


# Phrases


WORDS = "The big star next to a red circle"
SPANS = ((0, 12), (21, 33))
BOXES = (np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]]), np.array([[4.0, 4, 8, 8]]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("vocabulary"), WORDS)


@pytest.fixture
def mark(tokenizer):
    return functools.partial(marked, tokenizer)


def marked(tokenizer, text: SampleText, **changes) -> tuple[TextExample, ImageExample]:
    """The text as preprocessed with its phrases, and the image that it is about."""
    preprocessor = ReferringPreprocessor(TextTokenizer(tokenizer, **{"with_phrase_spans": True} | changes))
    image = photo()
    [example] = preprocess(preprocessor, sample_of(text), image)
    return example, image


def test_phrases_are_wordpieces_and_boxes_of_the_resized_image(mark, tokenizer):
    text = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES, is_complete=True))
    example, image = mark(text)
    own = example.phrases
    pieces = example.encoding.input_ids.tolist()
    said = [tokenizer.convert_ids_to_tokens(pieces[first:end]) for first, end in own.spans]
    assert said == [["the", "big", "star"], ["a", "red", "circle"]]
    assert own.is_complete and own.words == WORDS
    assert own.offsets[0].tolist() == [0, 0] and own.offsets[1].tolist() == [0, 3]
    for found, annotated in zip(own.boxes, BOXES, strict=True):
        np.testing.assert_allclose(found, image.image_transform.transform_boxes(annotated).astype(np.float32))


def test_a_mark_right_behind_a_phrase_is_no_part_of_it(mark):
    """The comma begins at the character at which the phrase ends."""
    text = SampleText(0, "the star,a circle", {}, phrases=PhraseBoxes(((0, 8), (9, 17)), BOXES))
    example, _ = mark(text)
    assert example.phrases.spans.tolist() == [[1, 3], [4, 6]]


def test_a_text_without_annotated_phrases_has_none_and_they_are_left_out_unless_asked_for(mark):
    example, _ = mark(SampleText(0, WORDS, {}))
    assert len(example.phrases.spans) == 0 and not example.phrases.is_complete
    text = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES))
    example, _ = mark(text, with_phrase_spans=False)
    assert example.phrases is None


@pytest.mark.parametrize(("limit", "spans"), [(10, [[1, 4], [6, 9]]), (5, [[1, 4], [3, 4]]), (4, [[1, 3], [2, 3]])])
def test_a_phrase_that_is_cut_off_becomes_what_stands_last_before_its_end(mark, limit, spans):
    text = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES))
    example, _ = mark(text, max_length=limit)
    assert example.phrases.spans.tolist() == spans


def test_joined_phrases_keep_their_texts_and_boxes(mark):
    one, _ = mark(SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES, is_complete=True)))
    none, _ = mark(SampleText(1, "the star", {}))
    unknown, _ = mark(SampleText(2, "the star", {}, phrases=PhraseBoxes(((0, 8),), None)))
    batch = PhraseBatch.join([none.phrases, one.phrases, unknown.phrases])
    assert batch.spans.counts.tolist() == [0, 2, 1] and batch.spans.owner.tolist() == [1, 1, 2]
    assert batch.boxes.counts.tolist() == [2, 1, 0] and batch.boxes.values.shape == (3, 4)
    assert batch.is_complete.tolist() == [False, True, False]
    assert batch.offsets.shape == (3, len(one.phrases.offsets), 2) and not batch.offsets[0, 4:].any()


def test_cutting_moves_spans_with_their_wordpieces(mark):
    one, _ = mark(SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES)))
    batch = PhraseBatch.join([one.phrases])
    length = len(one.phrases.offsets)
    index = torch.tensor([[0, 1, 2, 3, 4, length - 1]])  # [CLS] the big star next [SEP]
    cut = batch.truncate(index, torch.ones_like(index, dtype=torch.bool))
    assert cut.spans.values.tolist() == [[1, 4], [4, 5]]  # "a red circle" is gone; "next" stands before it
    assert cut.offsets[0, 1:4].tolist() == batch.offsets[0, 1:4].tolist()
    all_kept = batch.truncate(torch.arange(length)[None], torch.ones(1, length, dtype=torch.bool))
    assert torch.equal(all_kept.spans.values, batch.spans.values)


def test_wordpieces_know_which_of_them_go_on_with_a_word(tmp_path):
    """Words end where the tokenizer ends them: at white space, punctuation and Chinese characters."""
    tokenizer = make_tokenizer(tmp_path, "the star")
    texts = ("the redstar, don't $5 re-do", "星形 star星", "the\u200bstar", "é e\u0301 star\tstar\n🙂", "...", "star")
    for text in texts:
        example, _ = marked(tokenizer, SampleText(0, text, {}))
        words = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).word_ids
        expected = [False] + [one == other for one, other in itertools.pairwise(words)]
        batch = PhraseBatch.join([example.phrases])
        assert batch.continues_word.tolist() == [[False, *expected, False]], text
    assert "redstar" not in tokenizer.get_vocab()


def test_punctuation_is_known(tmp_path):
    example, _ = marked(make_tokenizer(tmp_path, "the star"), SampleText(0, "(the star)!", {}))
    assert PhraseBatch.join([example.phrases]).is_punctuation().tolist() == [
        [False, True, False, False, True, True, False]
    ]

from __future__ import annotations

import dataclasses
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
SAME = ImageTransform(original_size=(40, 50), size=(40, 50))
MIRRORED = ImageTransform(original_size=(40, 50), size=(80, 100), flipped=True)


def test_boxes_are_scaled_and_flipped_on_the_last_pixel():
    np.testing.assert_array_equal(TWICE.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[2, 4, 22, 45]])
    np.testing.assert_array_equal(MIRRORED.transform_boxes(np.array([[1, 2, 11, 22.5]])), [[99 - 22, 4, 99 - 2, 45]])


@pytest.mark.parametrize(
    ("transform", "boxes", "expected"),
    [
        (MIRRORED, [[0, 0, 50, 40], [-3, -4, 10, 99]], [[0, 0, 99, 79], [79, 0, 99, 79]]),
        (SAME, [[49, 39, 50, 40], [49.5, 0, 50, 40]], [[48, 38, 49, 39], [48, 0, 49, 39]]),
        (SAME, [[-5, 0, 0.25, 1]], [[0, 0, 0.25, 1]]),
        (dataclasses.replace(SAME, flipped=True), [[49.5, 0, 50, 9]], [[0, 0, 1, 9]]),
        (ImageTransform((1, 1), (1, 1)), [[0, 0, 1, 1]], [[0, 0, 1, 1]]),
    ],
)
def test_boxes_are_clamped_to_the_last_pixel_and_keep_an_area(transform, boxes, expected):
    found = transform.transform_and_clamp_boxes(np.array(boxes), "x")
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32


def test_referred_boxes_are_clamped_as_they_are():
    """As in VL-BERT's official data set of RefCOCO+: a box at the last pixel may be empty."""
    boxes = np.array([[-3, 2, 50, 22.5], [49.5, 0, 50, 40]])
    found = TWICE.transform_referred_boxes(boxes)
    np.testing.assert_array_equal(found, np.array([[0, 4, 99, 45], [99, 0, 99, 79]], np.float32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(MIRRORED.transform_referred_boxes(boxes)[0], [0, 4, 99, 45])


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
    rows = {"boxes": (2, 4), "class_probs": (2, 3), "roi_masks": (2, 7, 7), "features": (2, 5)}
    arrays = {name: np.ones(shape, dtype=np.float32) for name, shape in rows.items()}
    pixels, whole = np.zeros((4, 6, 3), dtype=np.uint8), np.ones(5, dtype=np.float32)
    arrays["box_classes"], rows["box_classes"] = np.array([0, 1]), (2,)
    image = ImageExample(pixels, TWICE, "photo", **arrays, box_ids=(1, 2), image_feature=whole)
    emptied = image.without_boxes()
    assert all(getattr(emptied, name).shape == (0, *shape[1:]) for name, shape in rows.items())
    assert emptied.box_ids is None and emptied.image_feature is whole
    assert len(image.boxes) == 2, "the image itself stays as it is"
    proposed = ImageExample(pixels, TWICE, "photo")
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


def test_targets_are_joined_and_truncated_with_their_texts():
    """The first wordpieces and the very last stay, as in `truncate_texts`."""
    rows = ([5, -1, 6, 7, 8], [1, 2, 3, 4, 5]), ([9, 3], [6, 7]), ([1, 2, 3], [8, 9, 1])
    joined = Words.join([Words(*map(np.array, pair), 10 + row) for row, pair in enumerate(rows)])
    assert joined.labels.tolist() == [[5, -1, 6, 7, 8], [9, 3, -1, -1, -1], [1, 2, 3, -1, -1]]
    assert joined.kinds.tolist()[1] == [6, 7, 0, 0, 0] and joined.labels.dtype == torch.int64
    attention_mask = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    ids = torch.arange(15).view(3, 5) * attention_mask
    texts = TextBatch(ids, torch.zeros_like(ids), attention_mask)
    shortened, index = truncate_texts(texts, torch.tensor([3, 2, 2]))
    parts = Parts({"words": joined, "some": Some(number=torch.tensor([1, 2, 3]))})
    cut = parts.truncate(index, shortened.attention_mask).parts
    assert cut["words"].labels.tolist() == [[5, -1, 8], [9, 3, -1], [1, 3, -1]]
    assert cut["words"].kinds.tolist() == [[1, 2, 5], [6, 7, 0], [8, 1, 0]]
    assert cut["words"].number.tolist() == [10, 11, 12] and cut["some"].number.tolist() == [1, 2, 3]
    assert joined.labels.shape == (3, 5), "a copy"


def phrases(spans: list[tuple[int, int]], *counts: int) -> Phrases:
    """With so many boxes per phrase; the coordinates of a box are its phrase's number."""
    boxes = [np.full((count, 4), number, dtype=np.float32) for number, count in enumerate(counts)]
    return Phrases(np.array(spans, dtype=np.int64).reshape(-1, 2), boxes)


def test_several_phrases_per_text_and_several_boxes_per_phrase():
    texts = [
        phrases([(0, 3), (4, 9)], 2, 0),  # the second phrase names nothing in the image
        phrases([]),
        phrases([(1, 2), (3, 4), (5, 6)], 1, 3, 1),
    ]
    joined = Phrases.join(texts)
    assert joined.spans.values.tolist() == [[0, 3], [4, 9], [1, 2], [3, 4], [5, 6]]
    assert joined.spans.counts.tolist() == [2, 0, 3] and joined.spans.owner.tolist() == [0, 0, 2, 2, 2]
    assert [rows.tolist() for rows in joined.spans.split()][:2] == [[[0, 3], [4, 9]], []]
    assert joined.boxes.counts.tolist() == [2, 0, 1, 3, 1], "a list per phrase, text by text"
    assert joined.boxes.values.shape == (7, 4) and joined.boxes.values.dtype == torch.float32
    assert joined.boxes.owner.tolist() == [0, 0, 2, 3, 3, 3, 4]
    assert [rows[:, 0].tolist() for rows in joined.boxes.split()] == [[0, 0], [], [0], [1, 1, 1], [2]]


def test_parts_are_joined_by_name_and_move_to_a_device():
    texts = [Parts({"some": Some(np.full(4, row), row), "words": Words(np.arange(row + 1))}) for row in range(3)]
    texts = [Parts({**text.parts, "phrases": phrases([(0, 3)], 2)}) for text in texts]
    joined = Parts.join(texts)
    assert list(joined.parts) == ["some", "words", "phrases"]
    assert joined.parts["some"].number.tolist() == [0, 1, 2] and joined.parts["some"].box[:, 0].tolist() == [0, 1, 2]
    assert joined.parts["words"].labels.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert joined.labelled_wordpieces(1) == [0, 1]
    moved = joined.to("meta").parts
    assert moved["some"].number.is_meta and not joined.parts["some"].number.is_meta
    assert moved["phrases"].boxes.values.is_meta and moved["phrases"].spans.counts.is_meta


def test_texts_without_a_target_are_told_apart():
    joined = Some.join([Some(np.ones(4), 3), Some(np.zeros(4), -1, has_target=False), Some(np.ones(4), 5)])
    assert joined.has_target.tolist() == [True, False, True] and joined.number.tolist() == [3, -1, 5]
    assert joined.with_target(joined.number).tolist() == [3, 5] and joined.to("meta").has_target.is_meta
    cut = joined.truncate(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool))
    assert cut.has_target.tolist() == [True, False, True]


# Phrases


WORDS = "The big star next to a red circle"
SPANS = ((0, 12), (21, 33))
BOXES = (np.array([[0.0, 0, 10, 10], [20, 0, 30, 10]]), np.array([[4.0, 4, 8, 8]]))
SAID = SampleText(0, WORDS, {}, phrases=PhraseBoxes(SPANS, BOXES, is_complete=True))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("vocabulary"), WORDS)


@pytest.fixture
def mark(tokenizer):
    """`mark(text)`: the text as preprocessed with its phrases, and the image that it is about."""

    def marked(text: SampleText, **changes) -> tuple[TextExample, ImageExample]:
        preprocessor = ReferringPreprocessor(TextTokenizer(tokenizer, **{"with_phrase_spans": True} | changes))
        image = photo()
        [example] = preprocess(preprocessor, sample_of(text), image)
        return example, image

    return marked


def test_phrases_are_wordpieces_and_boxes_of_the_resized_image(mark, tokenizer):
    example, image = mark(SAID)
    own = example.phrases
    pieces = example.encoding.input_ids.tolist()
    said = [tokenizer.convert_ids_to_tokens(pieces[first:end]) for first, end in own.spans]
    assert said == [["the", "big", "star"], ["a", "red", "circle"]]
    assert own.is_complete and own.words == WORDS
    assert own.offsets[0].tolist() == [0, 0] and own.offsets[1].tolist() == [0, 3]
    for found, annotated in zip(own.boxes, BOXES, strict=True):
        np.testing.assert_allclose(found, image.image_transform.transform_boxes(annotated).astype(np.float32))


def test_texts_without_phrases_and_punctuation_behind_a_phrase(mark):
    example, _ = mark(SampleText(0, WORDS, {}))
    assert len(example.phrases.spans) == 0 and not example.phrases.is_complete
    example, _ = mark(SAID, with_phrase_spans=False)
    assert example.phrases is None
    # the comma begins at the character at which the phrase ends
    example, _ = mark(SampleText(0, "the star,a circle", {}, phrases=PhraseBoxes(((0, 8), (9, 17)), BOXES)))
    assert example.phrases.spans.tolist() == [[1, 3], [4, 6]]
    is_punctuation = PhraseBatch.join([example.phrases]).is_punctuation()
    assert is_punctuation.tolist() == [[False, False, False, True, False, False, False]]


@pytest.mark.parametrize(("limit", "spans"), [(10, [[1, 4], [6, 9]]), (5, [[1, 4], [3, 4]]), (4, [[1, 3], [2, 3]])])
def test_a_phrase_that_is_cut_off_becomes_what_stands_last_before_its_end(mark, limit, spans):
    example, _ = mark(SAID, max_length=limit)
    assert example.phrases.spans.tolist() == spans


def test_joined_phrases_keep_their_texts_and_boxes(mark):
    one, _ = mark(SAID)
    none, _ = mark(SampleText(1, "the star", {}))
    unknown, _ = mark(SampleText(2, "the star", {}, phrases=PhraseBoxes(((0, 8),), None)))
    batch = PhraseBatch.join([none.phrases, one.phrases, unknown.phrases])
    assert batch.spans.counts.tolist() == [0, 2, 1] and batch.spans.owner.tolist() == [1, 1, 2]
    assert batch.boxes.counts.tolist() == [2, 1, 0] and batch.boxes.values.shape == (3, 4)
    assert batch.is_complete.tolist() == [False, True, False]
    assert batch.offsets.shape == (3, len(one.phrases.offsets), 2) and not batch.offsets[0, 4:].any()


def test_truncation_moves_spans_with_their_wordpieces(mark):
    one, _ = mark(SAID)
    batch = PhraseBatch.join([one.phrases])
    length = len(one.phrases.offsets)
    index = torch.tensor([[0, 1, 2, 3, 4, length - 1]])  # [CLS] the big star next [SEP]
    cut = batch.truncate(index, torch.ones_like(index, dtype=torch.bool))
    assert cut.spans.values.tolist() == [[1, 4], [4, 5]]  # "a red circle" is gone; "next" stands before it
    assert cut.offsets[0, 1:4].tolist() == batch.offsets[0, 1:4].tolist()
    all_kept = batch.truncate(torch.arange(length)[None], torch.ones(1, length, dtype=torch.bool))
    assert torch.equal(all_kept.spans.values, batch.spans.values)


def test_wordpieces_know_which_of_them_go_on_with_a_word(mark, tokenizer):
    """Words end where the tokenizer ends them: at whitespace, punctuation and Chinese characters."""
    texts = ("the redstar, don't $5 re-do", "星形 star星", "the\u200bstar", "é e\u0301 star\tstar\n🙂", "...", "star")
    for text in texts:
        example, _ = mark(SampleText(0, text, {}))
        words = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).word_ids
        expected = [False] + [one == other for one, other in itertools.pairwise(words)]
        batch = PhraseBatch.join([example.phrases])
        assert batch.continues_word.tolist() == [[False, *expected, False]], text
    assert "redstar" not in tokenizer.get_vocab()

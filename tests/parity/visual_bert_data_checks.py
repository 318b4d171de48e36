"""How the official VisualBERT code makes texts of pre-training: caption pairs, cutting, masking, task-specific texts.

Recorded draws are found by what they led to, so that they can be made again here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from e2e_vl.data.config import VCRDatasetConfig
from e2e_vl.data.vcr import VCRDataset
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.preprocessing import EncodedText
from e2e_vl.samples import CorrectChoice, HumanAnswers, Sample, SampleText
from e2e_vl.tasks.base import Sizes
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.words import mask_words
from e2e_vl.tasks.pretraining import PretrainingTask, build_objectives
from e2e_vl.text import TextTokenizer
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import part_of

visual_golden = common.visual_golden
data_rules, rules_tokenizer = common.data_rules, common.rules_tokenizer
DEVIATIONS = 5  # standard deviations by which two shares of draws may differ
MASKED = 0.15  # of the wordpieces; the official settings are those of every set


class Draws:
    """Gives these numbers in the place of random ones; seeds that the model would draw from are 0."""

    def __init__(self, share: float = 1.0, numbers: Iterable[int] = ()) -> None:
        self.share = share
        self.numbers = list(numbers)

    def spawn(self, count: int) -> list[Draws]:
        return [self] * count

    def random(self, size: int | None = None) -> float | np.ndarray:
        return self.share if size is None else np.ones(size)  # of wordpieces none is masked

    def integers(self, high: int, size: int | None = None) -> int | np.ndarray:
        if size is not None:
            return np.zeros(size, dtype=np.int64)
        return self.numbers.pop(0) if self.numbers else 0


def worded(
    rules_tokenizer: PreTrainedTokenizerBase,
    text: SampleText,
    draws: Draws | np.random.Generator,
    objectives: dict[str, Any],
    pool: list[str] | None = None,
    own: Iterable[int] = (),
) -> EncodedText:
    """One text as the settings of VisualBERT's pre-training word it."""
    settings = {"masked_text": 0.0, "masked_regions": 0.0} | objectives
    settings["masked_words"] = {"weight": 1.0, "whole_words": False} | settings.get("masked_words", {})
    made = build_objectives(settings, Sizes(8, len(rules_tokenizer)))
    task = PretrainingTask(Sizes(8, len(rules_tokenizer)), PretrainingConfig(pair_truncation="fronts_too_much"), made)
    preprocessor = task.preprocessor(TextTokenizer(rules_tokenizer, VisualBertEncoder.layout, training=True))
    sample = Sample((), (dataclasses.replace(text, image_index=()),), pool=pool, own_texts=list(own))
    [example] = preprocessor(sample, (), lambda _: draws)
    assert not getattr(draws, "numbers", None), "not all recorded draws were made"
    return example


def assert_text(example: EncodedText, recorded: dict[str, Any], rules_tokenizer: PreTrainedTokenizerBase) -> None:
    assert rules_tokenizer.convert_ids_to_tokens(example.encoding.input_ids) == recorded["tokens"]
    assert example.encoding.token_type_ids.tolist() == recorded["token_type_ids"]


# Length


def test_pretraining_cutting_of_pairs(data_rules, rules_tokenizer):
    for one in part_of(data_rules, "truncate_pair"):
        text_tokenizer = TextTokenizer(rules_tokenizer, VisualBertEncoder.layout, max_length=one["max_seq_length"])
        encoding = text_tokenizer.pair([5] * one["len_a"], [6] * one["len_b"], "fronts_too_much")
        first, second = (
            encoding.source[encoding.source >= 0][encoding.token_type_ids[encoding.source >= 0] == part]
            for part in (0, 1)
        )
        assert (len(first), len(second)) == (one["kept_a"], one["kept_b"]), one
        assert first.tolist() == list(range(one["first_a"], one["len_a"]))
        if one["kept_b"]:
            assert second[0] - one["len_a"] == one["first_b"]
        else:
            assert (
                encoding.token_type_ids.max() == 0
                and encoding.input_ids.tolist().count(rules_tokenizer.sep_token_id) == 1
            )
        assert len(encoding.input_ids) <= one["max_seq_length"]
        assert encoding.num_truncated == one["len_a"] + one["len_b"] - one["kept_a"] - one["kept_b"]


def test_pretraining_cutting_of_single_texts(data_rules, rules_tokenizer):
    one = part_of(data_rules, "truncate_single")
    encoding = TextTokenizer(rules_tokenizer, VisualBertEncoder.layout, max_length=one["max_seq_length"]).single(
        [5] * one["len_a"]
    )
    kept = encoding.source[encoding.source >= 0].tolist()
    assert kept == list(range(one["first"], one["first"] + one["kept"]))


# Captions


def own_captions(captions: list[dict[str, Any]], row: int) -> list[int]:
    """Rows of the captions of the same image."""
    return [index for index, one in enumerate(captions) if one["image_id"] == captions[row]["image_id"]]


OBJECTIVE = {
    "two_sentence": {"weight": 1.0, "text_format": "pair"},
    "single": {"weight": 1.0, "text_format": "single"},
    "mlm_only": 0.0,
}


def test_pretraining_captions_of_an_image_and_of_others(data_rules, rules_tokenizer):
    recorded = part_of(data_rules, "coco", "captions")
    captions = [one["caption"] for one in recorded]
    pieces = [rules_tokenizer.tokenize(caption) for caption in captions]
    rows = {one["id"]: row for row, one in enumerate(recorded)}
    for one in part_of(data_rules, "coco", "pairs"):
        number, is_match = rows[one["caption"]], one["label"]
        own = own_captions(recorded, number)
        parts = [
            list(part)
            for is_end, part in itertools.groupby(one["tokens"][1:], lambda token: token == "[SEP]")
            if not is_end
        ]
        draws = Draws()  # nothing is exchanged
        judged = parts[-1]
        candidates = [row for row, words in enumerate(pieces) if words == judged and (row in own) == (is_match != 0)]
        if one["mode"] == "two_sentence":
            candidates = [row for row in candidates if row != number]  # never the same caption twice
        assert candidates, one
        if is_match == 0:
            draws = Draws(0.0, candidates[:1])
        elif one["mode"] == "two_sentence":
            others = [index for index in own if index != number]
            draws = Draws(1.0, [others.index(candidates[0])])
        text = SampleText(number, captions[number], {})
        relationship = OBJECTIVE[one["mode"]]
        example = worded(rules_tokenizer, text, draws, {"relationship": relationship}, captions, own)
        assert_text(example, one, rules_tokenizer)
        label = example.targets.parts.get("relationship")
        assert (None if label is None else int(label.is_match)) == is_match, one


def test_pretraining_how_often_captions_fit(data_rules, rules_tokenizer):
    """Both modes are drawn half and half; the number of draws is recorded with them."""
    recorded = part_of(data_rules, "coco", "captions")
    captions = [one["caption"] for one in recorded]
    for mode, counts in part_of(data_rules, "coco", "counts").items():
        fits = {name: count for name, count in counts.items() if "same image: True" in name}
        total = sum(counts.values())
        assert all(f"label: {'None' if OBJECTIVE[mode] == 0.0 else int(name in fits)}" in name for name in counts)
        generator, found, draws = np.random.default_rng(0), 0, 300
        for index in range(draws):
            number = index % len(captions)
            text = SampleText(number, captions[number], {})
            own = own_captions(recorded, number)
            relationship = OBJECTIVE[mode]
            example = worded(rules_tokenizer, text, generator, {"relationship": relationship}, captions, own)
            found += example.record.get("is_match", True)
        share = sum(fits.values()) / total
        spread = np.sqrt(max(share * (1 - share), 0.0) * (1 / total + 1 / draws))
        assert abs(found / draws - share) <= DEVIATIONS * spread, mode


# Masking


def test_pretraining_how_often_wordpieces_are_masked(data_rules, rules_tokenizer):
    recorded = part_of(data_rules, "masking")
    count, unused = 60_000, len(rules_tokenizer) + 7  # a wordpiece that no random entry is
    ids, labels = mask_words(
        [[unused]] * count,
        np.random.default_rng(0),
        mask_id=rules_tokenizer.mask_token_id,
        vocab_size=len(rules_tokenizer),
        probability=MASKED,
    )
    chosen = labels >= 0
    number, entry = int(chosen.sum()), 1 / len(rules_tokenizer)  # [MASK] and the word itself may be random entries
    assert recorded["label_is_the_original"] and (labels[chosen] == unused).all()
    assert recorded["changed_without_label"] == 0 and (ids[~chosen] == unused).all()

    def assert_share(ours: float, theirs: float, of: int, draws: int) -> None:
        assert abs(ours - theirs) < DEVIATIONS * np.sqrt(theirs * (1 - theirs) * (1 / of + 1 / draws))

    labelled = int(recorded["tokens"] * recorded["labelled"])
    assert_share(chosen.mean(), recorded["labelled"], recorded["tokens"], count)
    assert_share((ids[chosen] == rules_tokenizer.mask_token_id).mean(), recorded["masked"], labelled, number)
    assert_share((ids[chosen] == unused).mean(), recorded["unchanged"] - 0.1 * entry, labelled, number)
    specials = [rules_tokenizer.cls_token_id, rules_tokenizer.sep_token_id]
    few = max(*specials, rules_tokenizer.mask_token_id) + 1  # of so few entries, special ones are surely drawn
    ids, labels = mask_words(
        [[unused]] * count,
        np.random.default_rng(0),
        mask_id=rules_tokenizer.mask_token_id,
        vocab_size=few,
        probability=MASKED,
    )
    assert np.isin(ids[labels >= 0], specials).any()
    if not recorded["special_tokens_as_replacement"]:  # by chance, in a large vocabulary
        assert 0.1 * labelled * len(specials) * entry < 2 * DEVIATIONS


# Task-specific texts


def test_pretraining_questions_with_an_answer(data_rules, rules_tokenizer):
    for one in part_of(data_rules, "vqa", "examples"):
        question = " ".join(one["question_tokens"])
        recorded = one["pre_train"]
        for words in (question, f"{question}?"):  # the official files of questions have the mark, their tokens do not
            text = SampleText(0, words, {}, HumanAnswers(("none of them", one["answer"])))
            settings = {"masked_words": {"answer": "letters"}, "relationship": 0.0}
            example = worded(rules_tokenizer, text, Draws(numbers=[1]), settings)
            assert_text(example, recorded, rules_tokenizer)
            assert ("relationship" in example.targets.parts) == recorded["has_sentence_label"]


def test_pretraining_sentences_about_two_images(data_rules, rules_tokenizer):
    found = [one for one in part_of(data_rules, "nlvr2", "examples") if one["pretraining"]]
    if not found:
        pytest.skip("the set has no NLVR2 text of pre-training; it is optional")
    for one in found:
        text = SampleText(0, one["item"]["sentence"], {}, CorrectChoice(one["label"]), image_index=())
        settings = {"relationship": {"weight": 1.0, "text_format": "labelled"}}
        example = worded(rules_tokenizer, text, Draws(), settings)
        assert_text(example, one, rules_tokenizer)
        assert int(example.targets.parts["relationship"].is_match) == one["sentence_label"]


def test_pretraining_captions_of_flickr30k(data_rules, rules_tokenizer):
    """Every wordpiece of the caption, and nothing else; phrases do not matter here."""
    for one in part_of(data_rules, "flickr", "entries"):
        example = worded(rules_tokenizer, SampleText(0, one["sentence"], {}), Draws(), {"relationship": 0.0})
        assert rules_tokenizer.convert_ids_to_tokens(example.encoding.input_ids) == one["tokens"]
        assert not example.encoding.token_type_ids.any()


def test_pretraining_which_text_of_a_question_is_read(data_rules):
    """`complete_shuffle` gives a question the same of its eight texts always: four answers, then four rationales."""
    reader = VCRDataset.__new__(VCRDataset)
    reader.options = VCRDatasetConfig(question="in_turn")
    for one in part_of(data_rules, "vcr", "shuffled_index"):
        item, which = one["index"] // 8, one["which"]
        assert one["item"] == item
        assert reader._is_answer(item) == (which < 4)
        assert item % 4 == which % 4  # what `ChoiceDraw` draws in turn

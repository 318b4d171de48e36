"""Texts, targets and files of the fine-tuned tasks against rules recorded from the official VisualBERT code.

VQA, NLVR2 and Flickr30K Entities; VCR's rules are in visual_bert_vcr_text_checks.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from detector.structures import ImageBatch
from e2e_vl.config_files import load_config
from e2e_vl.data.flickr30k import EntitySentence, read_sentences
from e2e_vl.data.nlvr2 import read_examples
from e2e_vl.encoders.visual_bert import VisualBertEncoder, relative_box_coordinates
from e2e_vl.metrics.flickr30k import correct_candidates
from e2e_vl.preprocessing import EncodedText
from e2e_vl.samples import CorrectChoice, EntityPhrases, HumanAnswers, SampleText
from e2e_vl.structures import Batch, ModelOutput, TaskOutput, TextBatch
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.config import Flickr30KConfig, NLVR2Config
from e2e_vl.tasks.flickr30k import Flickr30KTask
from e2e_vl.tasks.nlvr2 import NLVR2Task
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import TextTokenizer
from tests.parity import visual_bert_common as common
from tests.parity.visual_bert_common import part_of
from tests.tasks.preprocessors import photo, preprocess, sample_of, tokens

visual_golden = common.visual_golden
data_rules, rules_tokenizer = common.data_rules, common.rules_tokenizer
CONFIGS = Path(__file__).parents[2] / "configs"
ROUNDED = 1e-6  # recorded with six decimals


def preprocessor_of(task: Task, rules_tokenizer: PreTrainedTokenizerBase) -> Any:
    return task.preprocessor(TextTokenizer(rules_tokenizer, VisualBertEncoder.layout, training=True))


# VQA


def answering(data_rules: dict[str, Any], **fields: Any) -> VQATask:
    """The shipped task with the recorded answers."""
    settings = load_config(CONFIGS / "vqa/visual_bert.yaml", ["data.root=DATA"]).task.config
    answers = part_of(data_rules, "vqa", "answers")
    return VQATask(8, msgspec.structs.replace(settings, answers=answers, **fields))


def test_texts_of_questions(data_rules, rules_tokenizer):
    preprocessor = preprocessor_of(answering(data_rules), rules_tokenizer)
    for one in part_of(data_rules, "vqa", "examples"):
        question = " ".join(one["question_tokens"])  # the official code appends the mark
        [text] = preprocess(preprocessor, sample_of(SampleText(0, f"{question}?", {"question_id": 1})))
        assert tokens(text, rules_tokenizer) == one["fine_tune"]["tokens"]
        assert text.encoding.token_type_ids.tolist() == one["fine_tune"]["token_type_ids"]
        assert text.encoding.summary == len(text.encoding.input_ids) - 2
        assert one["fine_tune"]["tokens"][text.encoding.summary] == "[MASK]"


def test_targets_of_given_answers(data_rules, rules_tokenizer):
    preprocessor = preprocessor_of(answering(data_rules), rules_tokenizer)
    for one in part_of(data_rules, "vqa", "scores"):
        truth = HumanAnswers(tuple(one["given"]))
        [text] = preprocess(preprocessor, sample_of(SampleText(0, "what?", {"question_id": 1}, truth)))
        np.testing.assert_allclose(text.targets.scores, one["scores"], atol=ROUNDED)


def test_the_file_of_answers_may_hold_the_unknown_one(data_rules, tmp_path):
    recorded = part_of(data_rules, "vqa", "submission")
    logits, written = torch.tensor(recorded["logits"]), recorded["written"]
    side = torch.ones(len(written), 2, dtype=torch.int64)
    texts = TextBatch(*(torch.ones(len(written), 1, dtype=kind) for kind in (torch.long, torch.long, torch.bool)))
    batch = Batch(
        ImageBatch(torch.zeros(len(written), 3, 0, 0), side, side, ["image"] * len(written)),
        None,
        texts,
        torch.arange(len(written))[:, None],
        AnswerTargets(),
        records=[{"question_id": one["question_id"], "question": "what?"} for one in written],
    )
    task = answering(data_rules, unknown_can_win=True)
    found = task.predict(ModelOutput(TaskOutput({}, logits), None, None, None, batch))
    task.submission.write(tmp_path / "result.json", found)
    assert json.loads((tmp_path / "result.json").read_text("utf-8")) == written


# NLVR2


def test_texts_and_images_of_pairs(data_rules, rules_tokenizer, tmp_path):
    examples = [one for one in part_of(data_rules, "nlvr2", "examples") if not one["pretraining"]]
    if not examples:
        pytest.skip("the set has no NLVR2 text of fine-tuning; it is optional")
    preprocessor = preprocessor_of(NLVR2Task(8, NLVR2Config()), rules_tokenizer)
    for number, one in enumerate(examples):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(one["item"]) + "\n", encoding="utf-8")
        [example] = read_examples(file)
        assert [f"{name}.png.npz" for name in example.image_names] == one["features_file_keys"]
        text = SampleText(0, example.words, {"identifier": example.id}, CorrectChoice(one["label"]))
        sample = sample_of(dataclasses.replace(text, image_index=(0,)))
        [worded] = preprocess(preprocessor, sample, photo())
        assert tokens(worded, rules_tokenizer) == one["tokens"]
        assert worded.encoding.token_type_ids.tolist() == one["token_type_ids"]
        assert int(worded.targets.label) == one["label"] == int(example.label == "True")
        assert one["visual_types"] == [0] * one["regions_left"] + [1] * one["regions_right"]


# Flickr30K Entities


@pytest.fixture(scope="module")
def described(data_rules, tmp_path_factory) -> list[EntitySentence]:
    """The recorded sentences that have an entity with boxes."""
    file = tmp_path_factory.mktemp("sentences") / "1.txt"
    file.write_text("".join(f"{line}\n" for line in part_of(data_rules, "flickr", "sentences")), encoding="utf-8")
    truth = part_of(data_rules, "flickr", "ground_truth")
    return [one for one in read_sentences(file) if any(phrase.chain in truth for phrase in one.phrases)]


def grounded(data_rules: dict[str, Any], sentence: EntitySentence, tokenizer: PreTrainedTokenizerBase) -> EncodedText:
    truth = data_rules["flickr"]["ground_truth"]
    phrases = [phrase for phrase in sentence.phrases if phrase.chain in truth]
    boxes = EntityPhrases(
        tuple(phrase.span for phrase in phrases),
        tuple(np.array(truth[phrase.chain], dtype=np.float64) for phrase in phrases),
        entities=tuple(phrase.chain for phrase in phrases),
        types=tuple(phrase.types for phrase in phrases),
    )
    text = SampleText(0, sentence.words, {}, boxes)
    [made] = preprocess(preprocessor_of(Flickr30KTask(8, Flickr30KConfig()), tokenizer), sample_of(text))
    return made


def test_places_and_labels_of_phrases(data_rules, rules_tokenizer, described):
    entries = part_of(data_rules, "flickr", "entries")
    regions = np.array(part_of(data_rules, "flickr", "regions"))
    assert len(described) == len(entries)
    for sentence, one in zip(described, entries, strict=True):
        text = grounded(data_rules, sentence, rules_tokenizer)
        assert sentence.words == one["sentence"]
        assert tokens(text, rules_tokenizer) == one["tokens"]
        assert (text.targets.spans[:, 1] - 1).tolist() == one["flickr_position"]
        assert len(text.targets.boxes) == one["entity_num"]
        for boxes, targets, label in zip(text.targets.boxes, one["target_indices"], one["label"], strict=True):
            right = correct_candidates(regions, boxes)
            assert np.flatnonzero(right).tolist() == targets
            np.testing.assert_allclose(right / max(right.sum(), 1), label, atol=ROUNDED)


def test_overlap_of_regions_and_boxes(data_rules):
    for one in part_of(data_rules, "flickr", "iou"):
        a, b, iou = [one["a"]], [one["b"]], one["iou"]
        assert correct_candidates(a, b, iou - ROUNDED).all()
        assert not correct_candidates(a, b, iou + ROUNDED).any()


def test_numbers_of_boxes(data_rules):
    one = part_of(data_rules, "coco", "flickr_spatial")
    boxes = torch.tensor(one["boxes"], dtype=torch.float64)
    size = torch.tensor([[one["height"], one["width"]]]).expand(len(boxes), 2)
    np.testing.assert_allclose(relative_box_coordinates(boxes, size).numpy(), one["appended"], atol=ROUNDED)

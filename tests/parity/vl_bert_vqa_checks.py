"""VQA against arrays recorded from the official VL-BERT code, end to end and on precomputed features.

Configs and sizes are read from the set.
"""

from __future__ import annotations

import json

import pytest
import torch

from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch, PrecomputedDetector, PrecomputedFeatures
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.samples import HumanAnswers
from e2e_vl.structures import Batch
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.question_answering import AnswerTargets
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import swap_left_right
from tests.parity import vl_bert_common as common

assert_near = common.assert_near
golden = common.golden

VARIANTS = ("vqa_e2e", "vqa_prec")


def make_model(golden, keys, name: str) -> VisionLanguageModel:
    network = golden.meta["configs"][name]
    answers = [f"answer {number}" for number in range(golden["vqa_prec"]["in.label"].shape[1])]
    encoder = VLBertModel(common.encoder_config(golden, name))
    detector = (PrecomputedDetector if network["IMAGE_FEAT_PRECOMPUTED"] else FasterRCNN)(
        common.detector_config(golden, name)
    )
    task = VQATask(encoder.hidden_size, VQAConfig(answers=answers, dropout=network["CLASSIFIER_DROPOUT"]))
    model = VisionLanguageModel(detector, encoder, task)
    official = common.without_pooler(encoder, {**golden["trunk"], **golden.part("vqa_prec", "state.")})
    state = keys.split_state(official)
    encoder.load_state_dict(state["encoder"])
    task.load_state_dict(state["task"])
    if not network["IMAGE_FEAT_PRECOMPUTED"]:
        assert not detector.load_state_dict(state["detector"], strict=False).unexpected_keys
        for number in network["IMAGE_FROZEN_BACKBONE_STAGES"]:
            detector.get_submodule(common.STAGES[number - 1]).requires_grad_(False)
    return model.eval()


def make_batch(golden, name: str, dtype: torch.dtype = torch.float32) -> Batch:
    """The recorded questions and their images. Row 0 of the boxes, the whole image, is left to the detector."""
    data, recorded = golden["vqa_prec"], golden.part("visual", "e2e.")
    real = data["vlbert_in.object_mask"]
    images = common.image_batch(recorded["images"].to(dtype), data["in.im_info"])
    if name == "vqa_prec":
        rows = data["in.boxes"]
        features = PrecomputedFeatures(
            [image_rows[kept][1:, 4:].to(dtype) for image_rows, kept in zip(rows, real, strict=True)],
            rows[:, 0, 4:].to(dtype),
        )
        empty = torch.zeros(len(rows), 3, 0, 0)
        images = ImageBatch(empty, images.sizes, images.original_sizes, images.names, features)
    else:
        rows, real = recorded["boxes"], recorded["box_mask"]
    texts = common.recorded_texts(golden.part("vqa_prec", "vlbert_in."))
    texts.summary = texts.attention_mask.sum(dim=1) - 2  # at [MASK]; the last is [SEP]
    return Batch(
        images=images,
        boxes=[image_rows[kept][1:, :4].to(dtype) for image_rows, kept in zip(rows, real, strict=True)],
        texts=texts,
        image_index=torch.arange(len(rows))[:, None],
        targets=AnswerTargets(scores=data["in.label"].to(dtype)),
    )


def test_vqa_the_text_ends_with_the_answer_s_mask(golden):
    batch, question = make_batch(golden, "vqa_prec"), golden["vqa_prec"]["in.question"]
    rows = torch.arange(len(batch))
    mask = batch.texts.summary
    assert len(batch.texts.input_ids[rows, mask].unique()) == 1  # [MASK]
    assert torch.equal(batch.texts.input_ids[rows, mask - 1], batch.texts.input_ids[rows, mask + 1])  # [SEP]
    assert torch.equal(mask, (question > 0).sum(dim=1) + 2)  # [CLS] question [SEP] [MASK] [SEP]
    slots = torch.arange(batch.texts.input_ids.shape[1])
    segments = (slots >= mask[:, None]) & batch.texts.attention_mask
    assert torch.equal(batch.texts.token_type_ids, segments.long())

    special = common.SpecialTokens.of(batch.texts, with_mask=True)
    encoding = [special.fill_template(VLBertModel.layout.question, row[row > 0].tolist()) for row in question]
    common.assert_laid_out(encoding, batch.texts)
    assert [text.summary for text in encoding] == mask.tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_vqa_inputs_logits_and_loss(golden, vl_bert_keys, name):
    model, batch, recorded = make_model(golden, vl_bert_keys, name), make_batch(golden, name), golden[name]
    with torch.no_grad():
        output = model(batch)
        vectors = model.encoder.embeddings.region_vectors(output.text_regions)
        words = model.encoder.embeddings.word_vectors(batch.texts, vectors, output.text_regions)
    size, real = model.encoder.config.visual_size, output.text_regions.attention_mask
    assert_near(vectors[real], recorded["vlbert_in.object_vl_embeddings"][real][:, :size], "region vectors")
    attention_mask = batch.texts.attention_mask
    words = words.expand(*attention_mask.shape, -1)
    assert_near(words[attention_mask], recorded["vlbert_in.text_visual_embeddings"][attention_mask], "word vectors")
    assert_near(output.task.logits, recorded["out.label_logits"], "label_logits")
    assert_near(output.losses["vqa"].mean, recorded["out.loss"], "loss")
    values = golden.meta["values"][name]
    assert float(recorded["out.loss"]) == pytest.approx(values["loss"], rel=1e-6)
    batch.records = [{} for _ in range(len(batch))]
    answers = [prediction.answer for prediction in model.task.predict(output)]
    assert answers == [model.task.answer_vocabulary.answers[number] for number in values["argmax"]]


@pytest.mark.parametrize("name", VARIANTS)
def test_vqa_gradients(golden, vl_bert_keys, name):
    """In float64: those recorded in float64 for the CNN, and the float32 ones of everything behind it."""
    model = make_model(golden, vl_bert_keys, name).double()
    model(make_batch(golden, name, torch.float64)).losses["vqa"].mean.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    common.assert_gradients_near(golden, name, gradients, vl_bert_keys.our_key)
    assert not set(gradients) & {vl_bert_keys.our_key(key) for key in golden.meta["no_grad_params"][name]}


def test_vqa_soft_target_and_swapped_words(golden):
    recorded = json.loads((golden.folder / "data.json").read_text())
    target, words = recorded["vqa_target"], recorded["flip_words"]
    task = VQATask(4, VQAConfig(answers=target["vocab"]))
    ours = task.answer_vocabulary.targets_of(
        task.answer_vocabulary.labels_of(HumanAnswers(tuple(target["answers"]))).scores
    )
    assert ours.tolist() == pytest.approx(target["target"], abs=1e-7)
    assert swap_left_right(words["tokens"]) == words["out"]

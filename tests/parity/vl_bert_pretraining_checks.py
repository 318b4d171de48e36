"""Pre-training against arrays recorded from the official VL-BERT code: end to end, with the image-text relationship,
and on precomputed features. Configs and sizes are read from the set.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch, PrecomputedDetector, PrecomputedFeatures
from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig, VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, MaskingBatch, ModelOutput, RegionLabels, RegionMasks
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import (
    MaskedRegionsConfig,
    MaskedTextConfig,
    MaskedWordsConfig,
    PretrainingConfig,
    RelationshipConfig,
)
from e2e_vl.tasks.objectives.base import NO_LABEL, Objective, Sizes
from e2e_vl.tasks.objectives.regions import MaskedRegions
from e2e_vl.tasks.objectives.texts import MatchTargets, Relationship
from e2e_vl.tasks.objectives.words import MaskedText, MaskedWords, WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask
from tests.parity import vl_bert_common as common

assert_near = common.assert_near
golden = common.golden

VARIANTS = ("pretrain", "pretrain_rel", "pretrain_prec")
PARTS = {"masked_words": "mlm_loss_wvc", "masked_text": "mlm_loss_aux", "masked_regions": "mvrc_loss"}


def make_objectives(network: dict, config: PretrainedVLBertConfig) -> dict[str, Objective]:
    """The recorded losses, all of weight 1; the sentence-image relationship where it was switched on."""
    classes = network["VLBERT"]["visual_region_classes"]
    sizes = Sizes(config.hidden_size, config.vocab_size, config.feature_dim, classes - 1)
    objectives = {
        "masked_words": MaskedWords(sizes, MaskedWordsConfig(weight=1.0)),
        "masked_text": MaskedText(sizes, MaskedTextConfig(weight=1.0)),
        "masked_regions": MaskedRegions(sizes, MaskedRegionsConfig(weight=1.0, classes=classes)),
    }
    if network["WITH_REL_LOSS"]:
        objectives["relationship"] = Relationship(sizes, RelationshipConfig(weight=1.0))
    return objectives


def make_model(golden, keys, name: str) -> VisionLanguageModel:
    network = golden.meta["configs"][name]
    precomputed = network["IMAGE_FEAT_PRECOMPUTED"]
    config = common.encoder_config(
        golden,
        name,
        text_only_embedding=True,
        masked_region_embedding=True,
        masked_region_feature=precomputed or not network["MASK_RAW_PIXELS"],
    )
    task = PretrainingTask(
        Sizes(config.hidden_size, config.vocab_size), PretrainingConfig(), make_objectives(network, config)
    )
    detector = (PrecomputedDetector if precomputed else FasterRCNN)(common.detector_config(golden, name))
    model = VisionLanguageModel(detector, VLBertModel(config), task)
    official = {**golden["trunk"], **golden.part("pretrain", "state."), **golden.part(name, "state.")}
    if not network["WITH_REL_LOSS"]:
        official = {key: value for key, value in official.items() if "relationsip_head" not in key}
    state = keys.split_state(common.without_pooler(model.encoder, official))
    if not precomputed:
        assert not model.detector.load_state_dict(state["detector"], strict=False).unexpected_keys  # it has no RPN
        for number in network["IMAGE_FROZEN_BACKBONE_STAGES"]:
            model.detector.get_submodule(common.STAGES[number - 1]).requires_grad_(False)
    model.encoder.load_state_dict(state["encoder"])
    model.task.load_state_dict(state["task"])
    return model.eval()


def make_batch(golden, name: str, dtype: torch.dtype = torch.float32) -> Batch:
    """Captions with their images, then the text-only rows; regions are labelled and hidden as recorded."""
    data = golden.part("pretrain", "in.")
    encoder = golden.part(name if name == "pretrain_prec" else "pretrain", "vlbert_in.")
    captions = len(data["text"])
    real = encoder["object_mask"][:captions]
    rows = data["boxes"] if name != "pretrain_prec" else golden["pretrain_prec"]["in.boxes"]
    own = [image_rows[kept][1:].to(dtype) for image_rows, kept in zip(rows, real, strict=True)]  # row 0: whole image
    images = common.image_batch(data["image"].to(dtype), data["im_info"])
    if name == "pretrain_prec":
        features = PrecomputedFeatures([image_rows[:, 4:] for image_rows in own], rows[:, 0, 4:].to(dtype))
        images = ImageBatch(torch.zeros(captions, 3, 0, 0), images.sizes, images.original_sizes, images.names, features)
    texts = common.recorded_texts(encoder)
    with_image, without_image = torch.full((2, *texts.input_ids.shape), NO_LABEL)
    with_image[:captions, : data["mlm_labels"].shape[1]] = data["mlm_labels"]
    without_image[captions:, : data["aux_mlm_labels"].shape[1]] = data["aux_mlm_labels"]

    def of_boxes(values: Tensor) -> list[Tensor]:
        return [image_rows[kept][1:] for image_rows, kept in zip(values, real, strict=True)]

    no_image = torch.full((len(texts) - captions,), -1)
    parts = {
        "masked_words": WordLabels(with_image),
        "masked_text": WordLabels(without_image),
        "masked_regions": Targets(),
        "relationship": MatchTargets(torch.cat([data["relationship_label"], no_image])),
    }
    return Batch(
        images=images,
        boxes=[image_rows[:, :4] for image_rows in own],
        texts=texts,
        image_index=torch.cat([torch.arange(captions), no_image])[:, None],
        targets=PretrainingTargets(parts),
        masking=MaskingBatch(
            masked_regions=RegionMasks(
                is_labelled=[rows.sum(dim=1) > 0 for rows in of_boxes(data["mvrc_labels"])],
                is_masked=[rows == 1 for rows in of_boxes(data["mvrc_ops"])],
            )
        ),
        region_labels=RegionLabels(class_probs=of_boxes(data["mvrc_labels"].to(dtype))),
    )


def run(golden, keys, name: str) -> tuple[VisionLanguageModel, Batch, ModelOutput]:
    model, batch = make_model(golden, keys, name), make_batch(golden, name)
    with torch.no_grad():
        return model, batch, model(batch)


@pytest.mark.parametrize("name", VARIANTS)
def test_pretraining_logits_and_losses(golden, vl_bert_keys, name):
    model, batch, output = run(golden, vl_bert_keys, name)
    recorded = golden.part(name, "out.")
    captions = len(batch.images.names)
    words = model.task.word_head(output.encoded.text, output.encoded.word_embeddings).detach()
    for ours, logits, real in (
        (words[:captions], recorded["mlm_logits_wvc"], batch.texts.attention_mask[:captions]),
        (words[captions:], recorded["mlm_logits_aux"], batch.texts.attention_mask[captions:]),
    ):
        assert_near(ours[real], logits[real], "mlm_logits")
    real = output.text_regions.attention_mask[:captions]
    regions = model.task.masked_regions.classify(output.encoded.regions).detach()
    assert_near(regions[:captions][real], recorded["mvrc_logits"][real], "mvrc_logits")

    losses = output.task.losses
    for ours, theirs in PARTS.items():
        assert_near(losses[ours].mean, recorded[theirs], theirs)
    if "relationship_logits" in recorded:
        scores = model.task.relationship.head(output.encoded.summary[:captions]).detach()
        assert_near(scores, recorded["relationship_logits"], "relationship_logits")
        assert_near(losses["relationship"].mean, recorded["relationship_loss"], "relationship_loss")
    else:
        assert "relationship" not in losses
        assert float(recorded["relationship_loss"]) == 0
    assert_near(sum(loss.mean for loss in losses.values()), recorded["loss"], "loss")
    assert float(recorded["loss"]) == pytest.approx(golden.meta["values"][name]["loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["pretrain", "pretrain_prec"])
def test_pretraining_inputs_of_the_encoder(golden, vl_bert_keys, name):
    model, batch, output = run(golden, vl_bert_keys, name)
    recorded, embeddings = golden.part(name, "vlbert_in."), model.encoder.embeddings
    with torch.no_grad():
        vectors = embeddings.region_vectors(output.text_regions)
        words = embeddings.word_vectors(batch.texts, vectors, output.text_regions)
    captions, inputs = len(batch.images.names), golden.part("pretrain", "in.")
    for texts, given in ((slice(captions), inputs["text"]), (slice(captions, None), inputs["aux_text"])):
        attention_mask = batch.texts.attention_mask[texts]
        assert torch.equal(batch.texts.input_ids[texts][attention_mask], given[given > 0])  # [PAD] is 0
    real, size = recorded["object_mask"], model.encoder.config.visual_size
    assert torch.equal(output.text_regions.attention_mask, real)
    assert_near(vectors[real], recorded["object_vl_embeddings"][real][:, :size], "region vectors")
    attention_mask = batch.texts.attention_mask
    words = words.expand(*attention_mask.shape, -1)
    assert_near(words[attention_mask], recorded["text_visual_embeddings"][attention_mask], "word vectors")


def test_pretraining_losses_of_each_text_alone(golden, vl_bert_keys):
    """Recorded under `*_NORM_IN_BATCH_FIRST`, which no official file switches on and which is no setting here: the mean
    of each text's own mean, over the texts that have one, with 1e-4 added to each count.
    """
    key = "pretrain_norm_in_batch_first_OPTIONAL"
    if key not in golden.meta["values"]:
        pytest.skip("the set has no losses of each text alone; they are optional")
    model, batch, output = run(golden, vl_bert_keys, "pretrain")
    of_texts = {name: [] for name in PARTS}
    for text in range(len(batch)):
        alone = make_batch(golden, "pretrain")
        for name in ("masked_words", "masked_text"):
            alone.targets.parts[name].labels[torch.arange(len(batch)) != text] = NO_LABEL
        alone.masking.masked_regions.is_labelled = [
            rows & (image == int(batch.image_index[text, 0]))
            for image, rows in enumerate(batch.masking.masked_regions.is_labelled)
        ]
        with torch.no_grad():
            losses = model.task(alone, output.text_regions, output.encoded).losses
        for name, rows in of_texts.items():
            if losses[name].count:
                rows.append(losses[name].total / (losses[name].count + 1e-4))
    for name, theirs in PARTS.items():
        ours = torch.stack(of_texts[name]).sum() / (len(of_texts[name]) + 1e-4)
        assert float(ours) == pytest.approx(golden.meta["values"][key][theirs], rel=common.RELATIVE), theirs
    assert golden.meta["values"][key]["relationship_loss"] == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_pretraining_gradients(golden, vl_bert_keys, name):
    model = make_model(golden, vl_bert_keys, name).double()
    losses = model(make_batch(golden, name, torch.float64)).task.losses
    sum(loss.mean for loss in losses.values()).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    common.assert_gradients_near(golden, name, gradients, vl_bert_keys.our_key)
    frozen = {vl_bert_keys.our_key(key) for key in golden.meta["no_grad_params"][name] if "relationsip" not in key}
    assert not set(gradients) & frozen

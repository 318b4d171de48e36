"""Pre-training against arrays recorded from the official LXMERT code: logits, each loss, and the gradients of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor

from detector.config import DetectorConfig
from detector.structures import ImageBatch, PrecomputedDetector, PrecomputedFeatures
from e2e_vl.encoders.lxmert import LxmertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import Batch, DetectedLabels, MaskingBatch, ModelOutput, RegionLabels, RegionMasks
from e2e_vl.targets import Targets
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import Sizes
from e2e_vl.tasks.objectives.texts import AnswerLabel, MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets, PretrainingTask, build_objectives
from e2e_vl.weights.base import ModelWeights
from e2e_vl.weights.lxmert import to_official
from tests.parity import lxmert_common as common
from tests.parity.lxmert_common import assert_gradients_near, assert_near, gradients_of
from tests.parity.tolerances import NETWORK

golden = common.golden

LOSSES = {  # recorded -> ours
    "mask_lm": "masked_words",
    "matched": "relationship",
    "obj": "object_labels",
    "attr": "attribute_labels",
    "feat": "region_features",
    "qa": "image_qa",
}
LOGITS = {"matched": "relationship", "obj": "object_labels", "attr": "attribute_labels"}
DETECTED = {  # recorded -> field of `DetectedLabels`
    "obj_labels": "classes",
    "obj_confs": "scores",
    "attr_labels": "attributes",
    "attr_confs": "attribute_scores",
}


def recorded_losses(golden) -> dict[str, str]:
    """The losses that the set has, recorded name -> ours."""
    found = {theirs: ours for theirs, ours in LOSSES.items() if f"loss.{theirs}" in golden["pretrain"]}
    visual = [name for name in ("obj", "attr", "feat") if name in found]
    assert set(visual) == set(golden.meta["configs"]["pretrain"]["visual_losses"])
    return found


def objective_settings(golden) -> dict[str, dict]:
    """All of ours, with a weight of 0 for those that the set lacks."""
    recorded, used = golden.meta["configs"]["pretrain"], recorded_losses(golden).values()
    assert (recorded["smooth_l1_beta"], recorded["ignore_index"]) == (1.0, -1)
    visual = {"weight": recorded["visual_loss_weight"]}
    settings = {
        "masked_words": {"weight": 1.0, "whole_words": False},
        "masked_text": {"weight": 0.0},
        "masked_regions": {"weight": 0.0},
        "relationship": {"weight": 1.0},
        "object_labels": visual | {"classes": recorded["obj_id_num"]},
        "attribute_labels": visual | {"classes": recorded["attr_id_num"]},
        "region_features": visual,
        "image_qa": {"weight": 1.0, "answers": [f"answer {number}" for number in range(recorded["num_answers"])]},
    }
    return {name: value if name in used else value | {"weight": 0.0} for name, value in settings.items()}


def make_model(golden) -> VisionLanguageModel:
    config = common.encoder_config(golden)
    detector = PrecomputedDetector(DetectorConfig())
    detector.feature_dim = config.feature_dim  # small, as no ResNet has it
    sizes = Sizes(config.hidden_size, config.vocab_size, config.feature_dim)
    settings = PretrainingConfig(teacher="file", max_length=None)
    task = PretrainingTask(sizes, settings, build_objectives(objective_settings(golden), sizes))
    model = VisionLanguageModel(detector, LxmertEncoder(config), task)
    encoder, head = common.our_weights(common.official_weights(golden, "pretrain"))
    model.encoder.load_state_dict(encoder, strict=True)
    missing, unused = model.task.load_state_dict(head, strict=False)
    assert not missing
    assert_only_of_unused_losses(golden, unused)
    return model.eval()


def assert_only_of_unused_losses(golden, names: Collection[str]) -> None:
    """The official model has the heads of words and of matching, whether the set has their losses or not."""
    used = recorded_losses(golden).values()
    allowed = {"masked_words": "word_head.", "relationship": "relationship."}
    places = tuple(place for name, place in allowed.items() if name not in used)
    assert all(name.startswith(places) for name in names), names


def make_batch(golden, dtype: torch.dtype = torch.float32) -> Batch:
    """The recorded batch, whose features are masked already."""
    arrays = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in golden.part("pretrain", "in.").items()
    }
    count, regions = arrays["feat_mask"].shape
    side = torch.ones(count, 2, dtype=torch.int64)
    parts: dict[str, Targets] = {
        "masked_words": WordLabels(arrays.get("lm_labels", torch.full_like(arrays["input_ids"], -1))),
        "relationship": MatchTargets(arrays.get("matched_label", torch.ones(count, dtype=torch.int64))),
        "image_qa": AnswerLabel(arrays.get("ans", torch.full((count,), -1))),
        **{name: Targets() for name in ("object_labels", "attribute_labels", "region_features")},
    }
    labels = {ours: list(arrays[theirs]) for theirs, ours in DETECTED.items() if theirs in arrays}
    return Batch(
        images=ImageBatch(
            torch.zeros(count, 3, 0, 0),
            side,
            side,
            ["image"] * count,
            PrecomputedFeatures(list(arrays["visual_feats"])),
        ),
        boxes=list(arrays["boxes"]),
        texts=common.texts_of(arrays),
        image_index=torch.arange(count)[:, None],
        targets=PretrainingTargets(parts),
        masking=MaskingBatch(
            masked_regions=RegionMasks(list(arrays["feat_mask"] > 0), [torch.zeros(regions, dtype=torch.bool)] * count)
        ),
        region_labels=RegionLabels(features=list(arrays["target_feats"]), detected=DetectedLabels(**labels)),
    )


def means(output: ModelOutput) -> dict[str, Tensor]:
    return {name: loss.mean for name, loss in output.task.losses.items()}


def test_pretraining_logits_and_losses(golden):
    model, batch, recorded = make_model(golden), make_batch(golden), golden["pretrain"]
    with torch.no_grad():
        output = model(batch)
    names, real = recorded_losses(golden), batch.texts.attention_mask
    if "mask_lm" in names:
        words = model.task.word_head(output.encoded.text, output.encoded.word_embeddings).detach()
        assert_near(words[real], recorded["out.lm_logits"][real], "lm_logits")
    for theirs, ours in LOGITS.items():
        if theirs in names:
            logits = output.task.parts[ours]
            assert_near(logits, recorded[f"out.{theirs}_logits"].reshape(logits.shape), f"{theirs}_logits")
    if "feat" in names:
        kept = batch.masking.masked_regions.is_labelled
        predicted = recorded["out.feat_logits"][torch.stack(kept)]
        assert_near(output.task.parts["region_features"], predicted, "feat_logits")
    if "qa" in names:
        scores = model.task.image_qa.head(output.encoded.summary).detach()
        assert_near(scores, recorded["out.answer_logits"], "answer_logits")
    ours = means(output)
    assert set(ours) == set(names.values())
    for theirs, name in names.items():
        assert_near(ours[name], recorded[f"loss.{theirs}"], theirs)
        assert float(ours[name]) == pytest.approx(golden.meta["values"]["pretrain"][theirs], rel=NETWORK)
    assert_near(sum(ours.values()), recorded["loss.total"], "total")


def gradients(golden, name: str | None = None) -> dict[str, Tensor]:
    """Of one loss, or of all, by official names, from a float64 run; with those of the inputs."""
    model, batch = make_model(golden).double(), make_batch(golden, torch.float64)
    features = torch.stack(batch.images.precomputed.features).requires_grad_()
    boxes = torch.stack(batch.boxes).requires_grad_()
    batch.images.precomputed = PrecomputedFeatures(list(features))
    losses = means(model(dataclasses.replace(batch, boxes=list(boxes))))
    (sum(losses.values()) if name is None else losses[name]).backward()
    found = ModelWeights({}, gradients_of(model.encoder), gradients_of(model.task), "pretraining")
    inputs = {"in.visual_feats": features.grad, "in.boxes": boxes.grad}
    return to_official(found) | {key: value for key, value in inputs.items() if value is not None}


def test_gradients_of_all_losses(golden):
    assert_gradients_near(golden, "pretrain", gradients(golden))


def test_gradients_of_each_loss_alone(golden):
    names = recorded_losses(golden)
    for theirs, ours in names.items():
        recorded = golden.part("pretrain", f"grad_of.{theirs}.")
        assert recorded
        found = gradients(golden, ours)
        for name, value in recorded.items():
            assert_near(found[name], value, f"grad_of.{theirs}.{name}")


def edge_case(batch: Batch, name: str) -> Batch:
    parts = dict(batch.targets.parts)
    nothing = torch.full_like(parts["image_qa"].answer, -1)
    if name == "no_word_chosen":
        parts["masked_words"] = WordLabels(torch.full_like(parts["masked_words"].labels, -1))
    elif name == "no_answer":
        parts["image_qa"] = AnswerLabel(nothing)
    elif name == "no_region_chosen":
        batch.masking.masked_regions.is_labelled = [rows & False for rows in batch.masking.masked_regions.is_labelled]
    elif name == "all_unmatched":
        parts |= {"image_qa": AnswerLabel(nothing), "relationship": MatchTargets(nothing + 1)}
    else:
        pytest.fail(f"no such edge case is known: {name}")
    return dataclasses.replace(batch, targets=PretrainingTargets(parts))


def test_edge_cases(golden):
    """Where nothing is labelled the official loss is NaN (recorded: null), and ours 0."""
    cases: Mapping[str, Mapping[str, float | None]] = golden.meta["values"].get("pretrain_edge_cases", {})
    if not cases:
        pytest.skip("the set has no edge cases; they are optional")
    model, names = make_model(golden), recorded_losses(golden)
    for case, values in cases.items():
        with torch.no_grad():
            ours = means(model(edge_case(make_batch(golden), case)))
        for theirs, value in values.items():
            if theirs in names:
                assert float(ours[names[theirs]]) == pytest.approx(value or 0.0, rel=NETWORK, abs=1e-6), (case, theirs)

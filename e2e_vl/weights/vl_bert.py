"""Convert official VL-BERT checkpoints (`vl-bert-*.model` and fine-tuned ones), and initialise VL-BERT from BERT.

An official file is a dict with the state dict in `state_dict`, possibly in half precision. All names have the prefix
`module.`; fine-tuned models for VCR have `vlbert._module.` instead of `vlbert.`. Files contain two modules twice: res5
(see `detector.weight_names`), and the word embeddings as `vlbert.mlm_head.predictions.decoder.weight`.

The names follow the official code (jackroos/VL-BERT).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from detector.checkpoint import save_weights
from detector.config import DetectorConfig
from detector.structures import PrecomputedDetector
from detector.weight_names import VL_BERT, from_vl_bert, to_vl_bert
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import (
    PRETRAINING,
    WORD_EMBEDDINGS,
    BertStart,
    ModelWeights,
    Names,
    WeightAdapter,
    check_settings,
    check_task,
    invert,
    rename_head,
    replace_module,
    split_weights,
)

ENCODER = {
    "image_feature_extractor.obj_downsample.1": "embeddings.region_projection",
    "object_linguistic_embeddings": "embeddings.region_word_embedding",
    "object_mask_word_embedding": "embeddings.masked_region_word_embedding",
    "object_mask_visual_embedding": "embeddings.masked_region_feature",
    "aux_text_visual_embedding": "embeddings.text_only_embedding",
    "vlbert.word_embeddings": "embeddings.word_embeddings",
    "vlbert.position_embeddings": "embeddings.position_embeddings",
    "vlbert.token_type_embeddings": "embeddings.segment_embeddings",
    "vlbert.end_embedding": "embeddings.end_embedding",
    "vlbert.embedding_LayerNorm": "embeddings.norm",
    "vlbert.visual_1x1_text": "embeddings.text_visual.projection",
    "vlbert.visual_1x1_object": "embeddings.region_visual.projection",
    "vlbert.visual_ln_text": "embeddings.text_visual.norm",
    "vlbert.visual_ln_object": "embeddings.region_visual.norm",
    "vlbert.encoder.layer": "layers",
    "vlbert.pooler": "pooler",
}
SCALARS = {  # in place of the LayerNorms above, without `visual_layer_norm`
    "vlbert.visual_scale_text": "embeddings.text_visual.norm.weight",
    "vlbert.visual_scale_object": "embeddings.region_visual.norm.weight",
}
HEADS = {  # task -> its head
    PRETRAINING: {
        "vlbert.mlm_head.predictions.transform.dense": "word_head.transform.dense",
        "vlbert.mlm_head.predictions.transform.LayerNorm": "word_head.transform.norm",
        "vlbert.mlm_head.predictions.bias": "word_head.bias",
        "vlbert.mvrc_head.transform.dense": "masked_regions.transform.dense",
        "vlbert.mvrc_head.region_cls_pred": "masked_regions.output",
        "vlbert.relationsip_head.caption_image_relationship": "relationship.head",  # (sic)
    },
    "refcoco": {"final_mlp.0.dense": "head.transform.dense", "final_mlp.2": "head.output"},
    "vqa": {
        "final_mlp.0.dense": "head.transform.dense",
        "final_mlp.0.LayerNorm": "head.transform.norm",
        "final_mlp.2": "head.output",
    },
    "vcr": {
        "final_mlp.1": "head.output",
        "cnn_loss_reg.0.dense": "region_classifier.transform.dense",
        "cnn_loss_reg.2": "region_classifier.output",
    },
}
TASK_PREFIXES = {  # task -> prefixes that only its files have; the first match counts
    PRETRAINING: ("vlbert.mlm_head.", "vlbert.mvrc_head.", "vlbert.relationsip_head."),
    "vcr": ("cnn_loss_reg.", "final_mlp.1."),
    "vqa": ("final_mlp.0.LayerNorm.",),
    "refcoco": ("final_mlp.",),
}
DETECTOR = VL_BERT.removesuffix(".")  # module with the detector and one Linear of the encoder
SEGMENTS = "embeddings.segment_embeddings.weight"
DECODER = "vlbert.mlm_head.predictions.decoder.weight"
PRETRAINING_EMBEDDINGS = (  # only in the official pre-training model
    "embeddings.masked_region_word_embedding.",
    "embeddings.masked_region_feature.",
    "embeddings.text_only_embedding.",
)
OFFICIAL_CONFIG = {
    "geometry": "centre_size",
    "visual_part_on_end": False,
    "whole_image_in_sequence": True,
    "image_feature_on_words": True,
    "uses_whole_image": True,
    "norm_first": False,
    "relative_geometry": False,
    "proposal_scores": False,
    "max_images": 1,
}
OFFICIAL_DETECTOR: dict[str, Any] = {  # not visible in the weights; from configs/detector/vl_bert_R_101.yaml
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeads",
    "INPUT.FORMAT": "BGR",
    "MODEL.PIXEL_MEAN": [102.9801, 115.9465, 122.7717],
    "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
    "MODEL.RESNETS.STRIDE_IN_1X1": True,
    "MODEL.RESNETS.RES5_DILATION": 2,
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign",
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 14,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 1,
}
REGION_WORD = "embeddings.region_word_embedding.weight"
MASKED_REGION_WORD = "embeddings.masked_region_word_embedding.weight"
REGION_CLASSES = ("masked_regions.output.weight", "masked_regions.output.bias")  # a row per class


class OfficialVLBert(WeightAdapter):
    """Converts checkpoints of the official VL-BERT code."""

    layout = "VL-BERT"
    suffix = ".model"
    question_configs: ClassVar[Mapping[str, str]] = {
        "vqa": "vqa/vl_bert_base_pixels",
        "refcoco": "refcoco/vl_bert_base",
    }
    checked_fields = (
        "num_attention_heads",
        "hidden_act",
        "layer_norm_eps",
        "geometry",
        "visual_part_on_end",
        "whole_image_in_sequence",
    )
    optional = ("pooler.", "embeddings.image_slot_embeddings.")
    pretraining_only = PRETRAINING_EMBEDDINGS
    segment_tables = (SEGMENTS,)

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.removeprefix("module.").startswith("vlbert.") for name in tensors)

    @override
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        plain = {}
        for name, value in tensors.items():
            plain[name.removeprefix("module.").replace("vlbert._module.", "vlbert.", 1)] = value
        task_name = _find_task(plain)
        encoder, head = split_weights(plain, ENCODER | SCALARS, HEADS.get(task_name, {}), source, (DETECTOR,))
        transferable = ("",) if task_name == PRETRAINING else ()
        return ModelWeights(from_vl_bert(plain), encoder, head, task_name, transferable, move_background_last=False)

    @override
    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a `.model` file and return the names that were left out, see `to_official`.

        Pre-training weights are changed where the official code would otherwise compute something else: with
        `region_word: img` the vector of [IMG] is written for regions and for masked regions, and the background
        becomes the first class of the region classifier.
        """
        check_settings(model.encoder.config.to_dict(), OFFICIAL_CONFIG, path)
        if not isinstance(model.detector, PrecomputedDetector):
            settings = DetectorConfig.to_flat(model.detector.config) | model.detector.config.to_flat()
            check_settings(settings, OFFICIAL_DETECTOR, path)
        weights = ModelWeights.of_model(model, task_name)
        if model.encoder.config.region_word == "img" and task_name == PRETRAINING:
            weights.encoder[MASKED_REGION_WORD] = weights.encoder[REGION_WORD]
        if REGION_CLASSES[0] in weights.task and model.task.config.has_background_last:
            weights.task.update({name: weights.task[name].roll(1, dims=0) for name in REGION_CLASSES})
        official, left_out = to_official(weights)
        save_weights(official, path, "state_dict")
        return left_out


def _find_task(names: Iterable[str]) -> str | None:
    """Return the task whose head has such names; None: no task of ours."""
    for task_name, prefixes in TASK_PREFIXES.items():
        if any(name.startswith(prefixes) for name in names):
            return task_name
    return None


def to_official(weights: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """Invert `OfficialVLBert.convert`.

    Returns:
        The weights, with official names after the prefix `module.`, and the names (`detector.`, `encoder.`, `task.`)
        that an official model of this task does not have: RPN and box head, learned vectors of pre-training, an unused
        pooler, and other objectives.
    """
    check_task(weights.task_name, list(HEADS), "VL-BERT")
    head, left_out = rename_head(weights.task, HEADS[weights.task_name])
    for name in weights.detector:
        if not name.startswith(("backbone.", "roi_heads.res5.")):
            left_out.append(f"detector.{name}")
    unread: tuple[str, ...] = ()  # prefixes of parameters that the official model does not have
    if weights.task_name != PRETRAINING:
        unread += PRETRAINING_EMBEDDINGS
    if weights.task_name != "vcr" and "relationship.head.weight" not in weights.task:
        unread += ("pooler.",)
    official = to_vl_bert(weights.detector) | head
    for name, value in weights.encoder.items():
        names = SCALARS if value.ndim == 0 else ENCODER
        theirs = replace_module(name, invert(names))
        if theirs is None or name.startswith(unread):
            left_out.append(f"encoder.{name}")
        else:
            official[theirs] = value
    if "word_head.bias" in weights.task:
        official[DECODER] = weights.encoder[WORD_EMBEDDINGS]
    if weights.task_name == "vcr":
        official = {name.replace("vlbert.", "vlbert._module.", 1): value for name, value in official.items()}
    return {f"module.{name}": value for name, value in official.items()}, left_out


class VLBertFromBert(BertStart):
    """Initialises VL-BERT from BERT.

    BERT's two segments become segments 0 and 1 (official code); segment 2 (regions) stays random.
    """

    names: ClassVar[Names] = {
        "embeddings.word_embeddings": "embeddings.word_embeddings",
        "embeddings.position_embeddings": "embeddings.position_embeddings",
        "embeddings.token_type_embeddings": "embeddings.segment_embeddings",
        "embeddings.LayerNorm": "embeddings.norm",
        "encoder.layer": "layers",
        "pooler": "pooler",
    }

    @override
    def adapt(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Append the encoder's other rows to BERT's segment table."""
        table = encoder.state_dict()[SEGMENTS]
        segments = tensors.get(SEGMENTS)
        # the loader reports any other shape
        if segments is not None and segments.shape[1] == table.shape[1] and len(segments) <= len(table):
            tensors = {**tensors, SEGMENTS: torch.cat([segments, table[len(segments) :].float()])}
        return tensors, [f"BERT's segments -> the first rows of {SEGMENTS}"]

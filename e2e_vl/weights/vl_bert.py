"""Names of official VL-BERT checkpoints (`vl-bert-*.model`, fine-tuned ones too) <-> names of our three parts.

A file is a dict with the weights under `state_dict`, each name with the prefix `module.`, maybe in half precision. The
fine-tuned model of VCR has `vlbert._module.` where the others have `vlbert.`. Two things are in a file twice: res5 (see
`detector.weight_names`) and the word table, again as `vlbert.mlm_head.predictions.decoder.weight`.

Facts from the official code (jackroos/VL-BERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detector.config import DetectorConfig
from detector.errors import UserError
from detector.io import atomic_file
from detector.precomputed import PrecomputedDetector
from detector.structures import Detector
from detector.weight_names import VL_BERT, from_vl_bert, to_vl_bert
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import ModelWeights, WeightAdapter, replace_module

PRETRAINING = "pretraining"  # our name of the task
# official -> ours; a name is a parameter or, most often, the module that holds it
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
SCALARS = {  # instead of the LayerNorms above, with `visual_layer_norm` off
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
MARKS = {  # task -> names that only its files have; looked up in this order
    PRETRAINING: ("vlbert.mlm_head.", "vlbert.mvrc_head.", "vlbert.relationsip_head."),
    "vcr": ("cnn_loss_reg.", "final_mlp.1."),
    "vqa": ("final_mlp.0.LayerNorm.",),
    "refcoco": ("final_mlp.",),
}
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
SEGMENTS = "embeddings.segment_embeddings.weight"
DECODER = "vlbert.mlm_head.predictions.decoder.weight"
# Ours of what only the official pre-training model has.
PRETRAINING_EMBEDDINGS = (
    "embeddings.masked_region_word_embedding.",
    "embeddings.masked_region_feature.",
    "embeddings.text_only_embedding.",
)
ENCODER_CONFIG = {
    "geometry": "centre_size",
    "visual_part_on_end": False,
    "whole_image_in_sequence": True,
    "image_feature_on_words": True,
    "uses_whole_image": True,
    "norm_first": False,
}
OFFICIAL_DETECTOR: dict[str, Any] = {  # no weight shows it; keys of configs/detector/vl_bert_R_101.yaml
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
    """Models of the official VL-BERT code, in and out."""

    layout = "VL-BERT"
    suffix = ".model"
    same_config = (
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

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.removeprefix("module.").startswith("vlbert.") for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """Take an official state dict apart, cast to float32.

        Raises:
            ValueError: a name that no official model has, or two copies of one thing that differ.
        """
        tensors = {
            name.removeprefix("module.").replace("vlbert._module.", "vlbert.", 1): tensors[name] for name in tensors
        }
        task_name = next(
            (task for task, marks in MARKS.items() if any(name.startswith(marks) for name in tensors)), None
        )
        encoder, head, has_detector = {}, {}, False
        for name, value in tensors.items():
            value = value.float() if value.is_floating_point() else value
            if (ours := replace_module(name, ENCODER | SCALARS)) is not None:
                encoder[ours] = value
            elif name.startswith(VL_BERT):
                has_detector = True
            elif (ours := replace_module(name, HEADS.get(task_name, {}))) is not None:
                head[ours] = value
            elif name != DECODER:
                raise UserError(f"{source}: {name} is no name of an official VL-BERT model{_for(task_name)}.")
        words = encoder.get(WORD_EMBEDDINGS)
        if DECODER in tensors and (words is None or not torch.equal(tensors[DECODER].float(), words)):
            raise UserError(f"{source}: {DECODER} differs from vlbert.word_embeddings.weight; the file is damaged.")
        detector = from_vl_bert(tensors, source) if has_detector else {}
        transferable = ("",) if task_name == PRETRAINING else ()
        return ModelWeights(detector, encoder, head, task_name, transferable, background_last=False)

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write a `.model` file; returns what was left out, see `to_official`.

        Two things of pre-training are written so that the official code computes the same: with `region_word: img` the
        vector of [IMG] stands in both places, of regions and of hidden regions; and a region classifier with
        the background last gets it first.

        Raises:
            ValueError: the official code has no such model (its detector's settings are `OFFICIAL_DETECTOR`; one for
                precomputed features is not in the file), or the file's name does not end with `.model`.
        """
        path = Path(path)
        if path.suffix != self.suffix:
            raise UserError(f"{path}: official VL-BERT files are named *{self.suffix}.")
        if not isinstance(model.encoder, VLBertModel):
            raise UserError(f"{path}: the encoder is a {type(model.encoder).__name__}, not VL-BERT.")
        settings = model.encoder.config
        for name, value in ENCODER_CONFIG.items():
            if getattr(settings, name) != value:
                raise UserError(f"{path}: the official code has no encoder with {name} = {getattr(settings, name)}.")
        _check_detector(model.detector, path)
        detector, encoder, task = (dict(part.state_dict()) for part in (model.detector, model.encoder, model.task))
        if settings.region_word == "img" and task_name == PRETRAINING:
            encoder[MASKED_REGION_WORD] = encoder[REGION_WORD]
        if REGION_CLASSES[0] in task and model.task.config.has_background_last:
            task |= {name: task[name].roll(1, dims=0) for name in REGION_CLASSES}
        official, left_out = to_official(ModelWeights(detector, encoder, task, task_name))
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part, part.open("wb") as file:
            torch.save({"state_dict": {name: value.detach().cpu() for name, value in official.items()}}, file)
        return left_out


def _check_detector(detector: Detector, path: Path) -> None:
    if isinstance(detector, PrecomputedDetector):
        return
    settings = DetectorConfig.to_flat(detector.config) | detector.config.to_flat()  # the latter may lack defaults
    for key, official in OFFICIAL_DETECTOR.items():
        if settings[key] != official:
            raise UserError(
                f"{path}: the official code has {key} {official}, this model {settings[key]}, so it would compute "
                "other features from the same weights; train with configs/detector/vl_bert_R_101.yaml."
            )


def to_official(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `OfficialVLBert.convert`: official names with the prefix `module.`, as the files have them.

    Returns:
        the weights, and the names (`detector.`, `encoder.`, `task.`) of what an official model of this task has no
        place for and was left out: RPN and box head, learned vectors of pre-training, a pooler that nothing reads.

    Raises:
        ValueError: no official model has such a task, or such an encoder or head.
    """
    task = parts.task_name
    if task not in HEADS:
        raise UserError(f"There is no official VL-BERT model for the task '{task}', only for {', '.join(HEADS)}.")
    official = to_vl_bert(parts.detector)
    left_out = [f"detector.{name}" for name in parts.detector if not name.startswith(("backbone.", "roi_heads.res5."))]
    for name, value in parts.encoder.items():
        if _is_not_of(task, name, parts.task):
            left_out.append(f"encoder.{name}")
            continue
        theirs = replace_module(name, _reverse(SCALARS if value.ndim == 0 else ENCODER))
        if theirs is None:
            raise UserError(f"encoder.{name} has no place in an official VL-BERT model; its encoder has no such part.")
        official[theirs] = value
    for name, value in parts.task.items():
        theirs = replace_module(name, _reverse(HEADS[task]))
        if theirs is None:
            raise UserError(f"task.{name} has no place in an official VL-BERT model{_for(task)}.")
        official[theirs] = value
    if "word_head.bias" in parts.task:
        official[DECODER] = parts.encoder[WORD_EMBEDDINGS]
    if task == "vcr":
        official = {name.replace("vlbert.", "vlbert._module.", 1): value for name, value in official.items()}
    return {f"module.{name}": value for name, value in official.items()}, left_out


def _reverse(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: official for official, ours in names.items()}


def _is_not_of(task: str, name: str, head: Mapping[str, Tensor]) -> bool:
    """Whether the official model of a task lacks this part of our encoder."""
    if name.startswith(PRETRAINING_EMBEDDINGS):
        return task != PRETRAINING
    return name.startswith("pooler.") and not (task == "vcr" or "relationship.head.weight" in head)


def _for(task: str | None) -> str:
    return f" for {task}" if task else " without a head"

"""Names of the official VL-BERT parameters -> names of this project's detector, encoder and head."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

DETECTOR_PREFIX = "image_feature_extractor."
STAGES = {f"backbone.layer{number}": f"backbone.res{number + 1}" for number in (1, 2, 3)}

ENCODER = {
    "image_feature_extractor.obj_downsample.1": "embeddings.region_projection",
    "object_linguistic_embeddings": "embeddings.region_word_embedding",
    "object_mask_word_embedding": "embeddings.hidden_region_word_embedding",
    "object_mask_visual_embedding": "embeddings.hidden_region_feature",
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
    "vlbert.visual_scale_text": "embeddings.text_visual.norm.weight",
    "vlbert.visual_scale_object": "embeddings.region_visual.norm.weight",
    "vlbert.encoder.layer": "layers",
    "vlbert.pooler": "pooler",
}
REFERRING = {"final_mlp.0.dense": "head.transform.dense", "final_mlp.2": "head.output"}
VQA = REFERRING | {"final_mlp.0.LayerNorm": "head.transform.norm"}
PRETRAINING = {
    "vlbert.mlm_head.predictions.transform.dense": "mlm.transform.dense",
    "vlbert.mlm_head.predictions.transform.LayerNorm": "mlm.transform.norm",
    "vlbert.mlm_head.predictions.bias": "mlm.bias",
    "vlbert.mvrc_head.transform.dense": "region_classifier.transform.dense",
    "vlbert.mvrc_head.region_cls_pred": "region_classifier.output",
    "vlbert.relationsip_head.caption_image_relationship": "relationship",
}


def detector_key(official: str) -> str | None:
    """E.g. image_feature_extractor.backbone.layer2.0.bn1.weight -> backbone.res3.0.conv1.norm.weight."""
    name = official.removeprefix(DETECTOR_PREFIX)
    if name == official or name.startswith("obj_downsample") or name.endswith("num_batches_tracked"):
        return None
    name = re.sub(r"^backbone\.(conv1|bn1)", r"backbone.stem.\1", name)
    for theirs, ours in STAGES.items():
        name = name.replace(theirs, ours)
    name = name.replace("roi_head_feature_extractor", "roi_heads.res5")
    name = re.sub(r"\.bn(\d)\.", r".conv\1.norm.", name)
    return name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")


def encoder_key(official: str) -> str | None:
    """E.g. vlbert.encoder.layer.0.output.dense.weight -> layers.0.output.dense.weight."""
    return _replace_prefix(official, ENCODER)


def referring_key(official: str) -> str | None:
    """E.g. final_mlp.2.bias -> head.output.bias."""
    return _replace_prefix(official, VQA | PRETRAINING)


def _replace_prefix(official: str, prefixes: Mapping[str, str]) -> str | None:
    for theirs, ours in prefixes.items():
        if official == theirs or official.startswith(theirs + "."):
            return ours + official.removeprefix(theirs)
    return None


def split_state(official: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Official state -> {"detector", "encoder", "task"} states. Raises ValueError for a key that none of them has."""
    parts: dict[str, dict[str, Tensor]] = {"detector": {}, "encoder": {}, "task": {}}
    for key, tensor in official.items():
        if key.endswith("num_batches_tracked"):
            continue
        for part, rename in (("encoder", encoder_key), ("detector", detector_key), ("task", referring_key)):
            if (ours := rename(key)) is not None:
                parts[part][ours] = tensor
                break
        else:
            raise ValueError(f"{key} is not mapped to anything")
    return parts


def our_key(official: str) -> str:
    """Name in `VisionLanguageModel`, e.g. final_mlp.2.bias -> task.head.output.bias."""
    for part, rename in (("encoder", encoder_key), ("detector", detector_key), ("task", referring_key)):
        if (ours := rename(official)) is not None:
            return f"{part}.{ours}"
    raise ValueError(f"{official} is not mapped to anything")

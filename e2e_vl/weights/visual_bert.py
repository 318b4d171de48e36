"""Convert VisualBERT checkpoints, official (`*.th`) and of transformers, and initialise VisualBERT from BERT.

An official file is a plain state dict: the prefix `bert.bert.` is the trunk, any other `bert.` a head, and `detector.`
the region network in files for VCR (names in `detector.weight_names`). Our encoder has the parameter names of
transformers' VisualBERT.

The names follow the official code (uclanlp/visualbert); they were not compared with published files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.visual_bert.configuration_visual_bert import VisualBertConfig
from typing_extensions import override

from detector.checkpoint import save_weights
from detector.r2c import R2CNetwork
from detector.weight_names import REGION_NETWORK, from_visual_bert, to_visual_bert_name
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import (
    BERT_MODULES,
    POSITION_IDS,
    PRETRAINING,
    WORD_EMBEDDINGS,
    WORD_HEAD,
    BertStart,
    ModelWeights,
    Names,
    WeightAdapter,
    check_settings,
    check_task,
    invert,
    rename_head,
    replace_module,
    save_as_transformers,
    shared_fields,
    split_weights,
)

TRUNK = "bert.bert."
HEAD = "bert."
MASK_FILTER = "roi_heads.mask_filter.weight"  # only in the region network of R2C
OFFICIAL_NETWORK: dict[str, Any] = {  # settings of that network that are not visible in the weights
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign",
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 0,
}
ENCODER = {
    **{name: name for name in (*BERT_MODULES, "additional_layer")},
    "embeddings.token_type_embeddings_visual": "embeddings.visual_token_type_embeddings",
    "embeddings.position_embeddings_visual": "embeddings.visual_position_embeddings",
    "embeddings.projection": "embeddings.visual_projection",
}
PROJECTION = "embeddings.visual_projection.weight"
COPIED_TABLES = {  # text -> visual, see `special_visual_initialize`
    "embeddings.token_type_embeddings.weight": "embeddings.visual_token_type_embeddings.weight",
    "embeddings.position_embeddings.weight": "embeddings.visual_position_embeddings.weight",
}
DECODER = "cls.predictions.decoder.weight"  # tied to the word embeddings


@dataclasses.dataclass(frozen=True)
class HeadNames:
    """The head of a task in the other projects."""

    names: Names  # official, without the prefix `bert.`
    architecture: str  # class in transformers
    unused: tuple[str, ...] = ()  # modules in official files that are not used
    counts_labels: bool = False  # `num_labels` of transformers' config is the number of outputs


CLASSIFIER = {"classifier": "head.output"}
HEADS = {  # task -> its head
    PRETRAINING: HeadNames(WORD_HEAD | {"cls.seq_relationship": "relationship.head"}, "VisualBertForPreTraining"),
    "vqa": HeadNames(CLASSIFIER, "VisualBertForQuestionAnswering", counts_labels=True),
    "vcr": HeadNames(CLASSIFIER, "VisualBertForMultipleChoice"),
    "nlvr2": HeadNames(CLASSIFIER, "VisualBertForVisualReasoning", counts_labels=True),
    "flickr30k": HeadNames(
        {"flickr_attention.query": "query", "flickr_attention.key": "key"},
        "VisualBertForRegionToPhraseAlignment",
        unused=("cls", "flickr_attention.value"),
    ),
}
NO_HEAD = HeadNames({}, "VisualBertModel")
ANSWERS = "vqa"  # task whose `classifier` may have any number of rows
CLASSIFIER_ROWS = {1: "vcr", 2: "nlvr2"}  # rows of `classifier` -> task, except in runs of `ANSWERS`


class OfficialVisualBert(WeightAdapter):
    """Converts checkpoints of the official VisualBERT code."""

    layout = "VisualBERT"
    suffix = ".th"
    question_configs: ClassVar[Mapping[str, str]] = {
        "vqa": "vqa/visual_bert_pixels",
        "nlvr2": "nlvr2/visual_bert_pixels",
    }
    checked_fields = ("num_attention_heads", "hidden_act", "layer_norm_eps", "region_position", "region_types")
    # values of the encoder's config that the other project implements
    required_config: ClassVar[dict[str, Any]] = {
        "region_position": "official",
        "region_types": [0, 1],
        "project_equal_sizes": True,
        "relative_geometry": False,
        "proposal_scores": False,
    }

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith(TRUNK) for name in tensors)

    @override
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        classifier = {f"{HEAD}classifier": ""}
        rows = {len(value) for name, value in tensors.items() if replace_module(name, classifier) is not None}
        task_name = None
        if rows:
            task_name = CLASSIFIER_ROWS.get(min(rows), ANSWERS)
        if any(name.startswith(f"{HEAD}cls.") for name in tensors):
            task_name = PRETRAINING
        if any(name.startswith(f"{HEAD}flickr_attention.") for name in tensors):
            task_name = "flickr30k"
        rule = HEADS.get(task_name, NO_HEAD)
        encoder, task = split_weights(
            tensors,
            {f"{TRUNK}{theirs}": ours for theirs, ours in ENCODER.items()},
            {f"{HEAD}{theirs}": ours for theirs, ours in rule.names.items()},
            source,
            (REGION_NETWORK.removesuffix("."), *(f"{HEAD}{module}" for module in rule.unused)),
        )
        transferable = ("",) if task_name == PRETRAINING else ()
        compatible = (ANSWERS,) if task_name in CLASSIFIER_ROWS.values() else ()
        detector = from_visual_bert(tensors)
        return ModelWeights(detector, encoder, task, task_name, transferable, compatible_tasks=compatible)

    @override
    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a `.th` file and return the names that were left out, see `to_official`."""
        check_task(task_name, list(HEADS), "VisualBERT")
        check_settings(model.encoder.config.to_dict(), self.required_config, path)
        if isinstance(model.detector, R2CNetwork):
            check_settings(model.detector.config.to_flat(), OFFICIAL_NETWORK, path)
        state, left_out = to_official(ModelWeights.of_model(model, task_name))
        save_weights(state, path, key="")
        return left_out


def to_official(weights: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """Invert `OfficialVisualBert.convert`.

    Returns:
        The weights with official names, and the names that were left out: a detector other than R2C's region network,
        and heads that no official model has.
    """
    head, left_out = rename_head(weights.task, HEADS.get(weights.task_name, NO_HEAD).names)
    ours_to_theirs = invert(ENCODER)
    state = {}
    for name, value in weights.encoder.items():
        state[f"{TRUNK}{replace_module(name, ours_to_theirs)}"] = value
    for name, value in head.items():
        state[f"{HEAD}{name}"] = value
    if any(name.startswith("cls.predictions.") for name in head):
        state[f"{HEAD}{DECODER}"] = weights.encoder[WORD_EMBEDDINGS]
    if MASK_FILTER not in weights.detector:
        return state, left_out + [f"detector.{name}" for name in weights.detector]
    network = {to_visual_bert_name(name): value for name, value in weights.detector.items()}
    # official files have the batch counter, which frozen norms lack
    for name in list(network):
        if name.endswith("running_var"):
            counter = f"{name.removesuffix('running_var')}num_batches_tracked"
            network.setdefault(counter, torch.zeros((), dtype=torch.int64))
    return state | network, left_out


# Folders of transformers' VisualBERT


TRANSFORMERS_PREFIX = "visual_bert."  # of the trunk
TRANSFORMERS_NAMES = {  # transformers' -> official
    **{f"{TRANSFORMERS_PREFIX}{ours}": f"{TRUNK}{theirs}" for theirs, ours in ENCODER.items()},
    "cls.predictions": f"{HEAD}cls.predictions",
    "cls.seq_relationship": f"{HEAD}cls.seq_relationship",
    "cls": f"{HEAD}classifier",
    "attention": f"{HEAD}flickr_attention",
}


class TransformersVisualBert(OfficialVisualBert):
    """Checkpoints of transformers' VisualBERT with a head."""

    layout = "transformers' VisualBERT"
    suffix = ".safetensors"
    # the types of regions are an argument in transformers; its late fusion raises an error
    required_config: ClassVar[dict[str, Any]] = {
        "region_position": "official",
        "bypass_transformer": False,
        "project_equal_sizes": True,
        "relative_geometry": False,
        "proposal_scores": False,
    }

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        is_old_trunk = POSITION_IDS in tensors and PROJECTION in tensors
        return is_old_trunk or any(name.startswith(TRANSFORMERS_PREFIX) for name in tensors)

    @override
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        is_trunk_alone = not any(name.startswith(TRANSFORMERS_PREFIX) for name in tensors)
        official = {}
        for name, value in tensors.items():
            if name.endswith(POSITION_IDS):
                continue
            full_name = f"{TRANSFORMERS_PREFIX}{name}" if is_trunk_alone else name
            official[replace_module(full_name, TRANSFORMERS_NAMES) or full_name] = value
        return super().convert(official, source)

    @override
    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a folder's `model.safetensors` and `config.json`.

        For a task without a head in transformers, only the trunk (`VisualBertModel`) is written. A user of the file
        must pass `visual_token_type_ids` according to `region_types` (transformers' default is 1) and, with
        `with_box_coordinates`, features with the box coordinates appended.

        Returns:
            The names of the parameters left out.
        """
        check_settings(model.encoder.config.to_dict(), self.required_config, path)
        weights = ModelWeights.of_model(model, task_name)
        state, left_out = to_transformers(weights)
        save_as_transformers(state, make_transformers_config(model.encoder, weights), path)
        return left_out


def to_transformers(weights: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """Invert `TransformersVisualBert.convert`, without tied weights.

    Returns:
        The weights with transformers' names, and the names that were left out: the detector and additional heads.
    """
    official, left_out = to_official(dataclasses.replace(weights, detector={}))
    official.pop(f"{HEAD}{DECODER}", None)
    official_to_theirs = invert(TRANSFORMERS_NAMES)
    is_trunk_alone = weights.task_name not in HEADS
    state = {}
    for name, value in official.items():
        theirs = replace_module(name, official_to_theirs)
        if is_trunk_alone:
            theirs = theirs.removeprefix(TRANSFORMERS_PREFIX)
        state[theirs] = value
    return state, left_out + [f"detector.{name}" for name in weights.detector]


def make_transformers_config(encoder: VisualBertEncoder, weights: ModelWeights) -> VisualBertConfig:
    """Make the config of transformers, in which no row of the word embeddings is for padding, as in official code."""
    rule = HEADS.get(weights.task_name, NO_HEAD)
    fields = shared_fields(encoder.config, VisualBertConfig, "pad_token_id")
    if rule.counts_labels:
        fields["num_labels"] = len(weights.task["head.output.weight"])
    return VisualBertConfig(
        **fields,
        visual_embedding_dim=encoder.config.visual_embedding_dim,
        pad_token_id=None,
        architectures=[rule.architecture],
    )


class VisualBertFromBert(BertStart):
    """Initialises VisualBERT from BERT; the projection stays random.

    With `special_visual_initialize` the visual tables are copies of BERT's, as in the official code. BERT's
    next-sentence head is also loaded, as in the official code, although the labels there have the opposite order.
    """

    head_names = HEADS[PRETRAINING].names
    transferable = ("word_head.", "relationship.")

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        """Recognise BERT, but not our encoder, which also has visual tables."""
        return super().recognises(tensors) and not COPIED_TABLES.values() & tensors.keys()

    @override
    def adapt(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        if not encoder.config.special_visual_initialize:
            return tensors, []
        copies = {text: visual for text, visual in COPIED_TABLES.items() if text in tensors}
        tensors = tensors | {visual: tensors[text] for text, visual in copies.items()}
        return tensors, [f"{text} -> {visual}" for text, visual in copies.items()]

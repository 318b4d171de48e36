"""Official VisualBERT checkpoints (`*.th`), transformers' VisualBERT, and BERT as a start of VisualBERT.

An official file is a bare state dict: `bert.bert.` is the trunk, `bert.` in front of other names a head, and in files
of VCR `detector.` the network of regions, whose names are in `detector.weight_names`. Our encoder has the names of
transformers' VisualBERT.

Facts from the official code (uclanlp/visualbert); the published files themselves were not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.visual_bert.configuration_visual_bert import VisualBertConfig

from detector.r2c import R2CNetwork
from detector.weight_names import REGION_NETWORK, from_visual_bert, visual_bert_name
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import (
    MODULES,
    POSITION_IDS,
    PRETRAINING,
    WORD_EMBEDDINGS,
    WORD_HEAD,
    BertStart,
    ModelWeights,
    Names,
    WeightAdapter,
    check_settings,
    on_cpu,
    rename_head,
    replace_module,
    require_task,
    reverse,
    save_for_torch,
    save_for_transformers,
    shared_fields,
    split_names,
    state_dicts,
)

TRUNK, HEAD = "bert.bert.", "bert."
MASK_FILTER = "roi_heads.mask_filter.weight"  # only the network of R2C has it
OFFICIAL_NETWORK: dict[str, Any] = {  # settings of that network that no weight shows
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign",
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 0,
}
ENCODER = {
    **{name: name for name in (*MODULES, "additional_layer")},
    "embeddings.token_type_embeddings_visual": "embeddings.visual_token_type_embeddings",
    "embeddings.position_embeddings_visual": "embeddings.visual_position_embeddings",
    "embeddings.projection": "embeddings.visual_projection",
}
PROJECTION = "embeddings.visual_projection.weight"
COPIED_TABLES = {  # text -> visual, see `special_visual_initialize`
    "embeddings.token_type_embeddings.weight": "embeddings.visual_token_type_embeddings.weight",
    "embeddings.position_embeddings.weight": "embeddings.visual_position_embeddings.weight",
}
DECODER = "cls.predictions.decoder.weight"  # the word embeddings again


@dataclasses.dataclass(frozen=True)
class HeadNames:
    """The head of one task in other projects."""

    names: Names  # official, without `bert.` in front
    architecture: str  # of transformers, which has such a head
    unused: tuple[str, ...] = ()  # official modules in the files of this task that nothing reads
    counts_labels: bool = False  # transformers' config says how many rows the last Linear has


CLASSIFIER = {"classifier": "head.output"}
HEADS = {  # our name of a task -> its head
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
ANSWERS = "vqa"  # the task whose `classifier` may have any number of rows
CLASSIFIER_ROWS = {1: "vcr", 2: "nlvr2"}  # rows of `classifier` -> task, unless a run of `ANSWERS` asks for it


class OfficialVisualBert(WeightAdapter):
    """Models of the official VisualBERT code, in and out."""

    layout = "VisualBERT"
    suffix = ".th"
    same_config = ("num_attention_heads", "hidden_act", "layer_norm_eps", "region_position", "region_types")
    # fields of our encoder's config, with their values in the other project
    needed_config: ClassVar[dict[str, Any]] = {
        "region_position": "official",
        "region_types": [0, 1],
        "project_equal_sizes": True,
        "relative_geometry": False,
    }

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith(TRUNK) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        classifier = {f"{HEAD}classifier": ""}
        rows = {len(value) for name, value in tensors.items() if replace_module(name, classifier) is not None}
        task_name = CLASSIFIER_ROWS.get(min(rows), ANSWERS) if rows else None
        if any(name.startswith(f"{HEAD}cls.") for name in tensors):
            task_name = PRETRAINING
        if any(name.startswith(f"{HEAD}flickr_attention.") for name in tensors):
            task_name = "flickr30k"
        rule = HEADS.get(task_name, NO_HEAD)
        encoder, task = split_names(
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

    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a `.th` file; returns what was left out, see `official_state`."""
        require_task(task_name, list(HEADS), "VisualBERT")
        check_settings(model.encoder.config.to_dict(), self.needed_config, path)
        if isinstance(model.detector, R2CNetwork):
            check_settings(model.detector.config.to_flat(), OFFICIAL_NETWORK, path)
        state, left_out = official_state(state_dicts(model, task_name))
        save_for_torch(on_cpu(state), path)
        return left_out


def official_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `OfficialVisualBert.convert`.

    Returns:
        the weights by official names, and what was left out: a detector other than the network of R2C, and side heads
        and objectives that no official model has.
    """
    head, left_out = rename_head(parts.task, HEADS.get(parts.task_name, NO_HEAD).names)
    state = {f"{TRUNK}{replace_module(name, reverse(ENCODER))}": value for name, value in parts.encoder.items()}
    state |= {f"{HEAD}{name}": value for name, value in head.items()}
    if any(name.startswith("cls.predictions.") for name in head):
        state[f"{HEAD}{DECODER}"] = parts.encoder[WORD_EMBEDDINGS]
    if MASK_FILTER not in parts.detector:
        return state, left_out + [f"detector.{name}" for name in parts.detector]
    network = {visual_bert_name(name): value for name, value in parts.detector.items()}
    # a frozen norm counts no batches, and official files have the counter
    for norm in (name.removesuffix("running_var") for name in list(network) if name.endswith("running_var")):
        network.setdefault(f"{norm}num_batches_tracked", torch.zeros((), dtype=torch.int64))
    return state | network, left_out


# Folders of transformers' VisualBERT


IN_TRANSFORMERS = "visual_bert."  # in front of the trunk
TRANSFORMERS_NAMES = {  # transformers' -> official
    **{f"{IN_TRANSFORMERS}{ours}": f"{TRUNK}{theirs}" for theirs, ours in ENCODER.items()},
    "cls.predictions": f"{HEAD}cls.predictions",
    "cls.seq_relationship": f"{HEAD}cls.seq_relationship",
    "cls": f"{HEAD}classifier",
    "attention": f"{HEAD}flickr_attention",
}


class TransformersVisualBert(OfficialVisualBert):
    """VisualBERT of transformers with a head, in and out."""

    layout = "transformers' VisualBERT"
    suffix = ".safetensors"
    # users name the types of regions in each call; transformers' late fusion fails
    needed_config: ClassVar[dict[str, Any]] = {
        "region_position": "official",
        "bypass_transformer": False,
        "project_equal_sizes": True,
        "relative_geometry": False,
    }

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        is_old_trunk = POSITION_IDS in tensors and PROJECTION in tensors
        return is_old_trunk or any(name.startswith(IN_TRANSFORMERS) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        prefix = "" if any(name.startswith(IN_TRANSFORMERS) for name in tensors) else IN_TRANSFORMERS
        tensors = {f"{prefix}{name}": value for name, value in tensors.items() if not name.endswith(POSITION_IDS)}
        official = {replace_module(name, TRANSFORMERS_NAMES) or name: value for name, value in tensors.items()}
        return super().convert(official, source)

    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a folder's `model.safetensors` and `config.json`.

        A task that has no head in transformers gives the trunk alone (`VisualBertModel`). Users of the folder pass
        `visual_token_type_ids` as `region_types` says (transformers takes 1 if they are left out), and features that
        end with the numbers of the boxes if the encoder has `with_box_numbers`.
        """
        check_settings(model.encoder.config.to_dict(), self.needed_config, path)
        parts = state_dicts(model, task_name)
        state, left_out = transformers_state(parts)
        save_for_transformers(state, transformers_config(model.encoder, parts), path)
        return left_out


def transformers_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `TransformersVisualBert.convert`; what is tied to something else is left to transformers.

    Returns:
        the weights by transformers' names, and what was left out: the detector, side heads and objectives.
    """
    official, left_out = official_state(dataclasses.replace(parts, detector={}))
    official.pop(f"{HEAD}{DECODER}", None)
    state = {replace_module(name, reverse(TRANSFORMERS_NAMES)): value for name, value in official.items()}
    if parts.task_name not in HEADS:
        state = {name.removeprefix(IN_TRANSFORMERS): value for name, value in state.items()}
    return state, left_out + [f"detector.{name}" for name in parts.detector]


def transformers_config(encoder: VisualBertEncoder, parts: ModelWeights) -> VisualBertConfig:
    """The settings that both projects have. No row of the word embeddings is padding, as in the official code."""
    rule = HEADS.get(parts.task_name, NO_HEAD)
    fields = shared_fields(encoder.config, VisualBertConfig, "pad_token_id")
    if rule.counts_labels:
        fields["num_labels"] = len(parts.task["head.output.weight"])
    return VisualBertConfig(
        **fields,
        visual_embedding_dim=encoder.config.visual_embedding_dim,
        pad_token_id=None,
        architectures=[rule.architecture],
    )


class VisualBertFromBert(BertStart):
    """BERT fills the parts of VisualBERT that it has, the projection stays random.

    With `special_visual_initialize` the visual tables become copies of BERT's, as in the official code. Of the heads
    BERT's sentence head is converted too; the official code loads it although its own labels have the classes swapped.
    """

    head_names = HEADS[PRETRAINING].names
    transferable = ("word_head.", "relationship.")

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        """A BERT has no tables of regions; our own encoder has, and BERT's other names."""
        return super().recognise(tensors) and not COPIED_TABLES.values() & tensors.keys()

    def fit(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Copies for the visual tables."""
        if not encoder.config.special_visual_initialize:
            return tensors, []
        copies = {text: visual for text, visual in COPIED_TABLES.items() if text in tensors}
        tensors = tensors | {visual: tensors[text] for text, visual in copies.items()}
        return tensors, [f"{text} -> {visual}" for text, visual in copies.items()]

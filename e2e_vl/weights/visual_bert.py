"""Names of official VisualBERT checkpoints (`*.th`) and of transformers' VisualBERT <-> names of our encoder and heads.

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

from detector.errors import UserError
from detector.r2c import R2CNetwork
from detector.weight_names import REGION_NETWORK, from_visual_bert, visual_bert_name
from e2e_vl.encoders.visual_bert import BOX_NUMBERS, VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import (
    PRETRAINING,
    WORD_EMBEDDINGS,
    ModelWeights,
    WeightAdapter,
    as_float32,
    check_detector,
    check_encoder,
    check_tied,
    on_cpu,
    replace_module,
    require_task,
    reverse,
    save_for_torch,
    save_for_transformers,
    shared_fields,
    state_dicts,
    unknown_name,
)
from e2e_vl.weights.bert import WORD_HEAD, BertStart

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
BERT_MODULES = (
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
    "embeddings.LayerNorm",
    "encoder.layer",
    "pooler",
)
ENCODER = {  # official -> ours; a name is the module that holds the parameters
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
DECODER = "cls.predictions.decoder.weight"  # the word embeddings again


@dataclasses.dataclass(frozen=True)
class HeadNames:
    """The head of one task in other projects."""

    # official, without `bert.` in front -> ours; the parameters, or the modules that hold them
    names: Mapping[str, str]
    architecture: str  # of transformers, which has such a head
    optional: tuple[str, ...] = ()  # ours of those that a model may lack
    unused: tuple[str, ...] = ()  # official modules that stand in the files of this task although nothing reads them
    counts_labels: bool = False  # transformers' config says how many rows the last Linear has


CLASSIFIER = {"classifier": "head.output"}
HEADS = {  # our name of a task -> its head
    PRETRAINING: HeadNames(
        {
            "cls.predictions.transform.dense": "word_head.transform.dense",
            "cls.predictions.transform.LayerNorm": "word_head.transform.norm",
            "cls.predictions.bias": "word_head.bias",
            "cls.seq_relationship": "relationship.head",
        },
        "VisualBertForPreTraining",
        optional=("relationship.head",),
    ),
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


class _VisualBertFiles(WeightAdapter):
    """What both formats share."""

    needed_config: ClassVar[dict[str, Any]]  # fields of our encoder's config, with their values in the other project

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Refuses a fusion or features other than the encoder's, with the setting to change."""
        config = encoder.config
        is_late = any(name.startswith("additional_layer.") for name in tensors)
        if is_late != config.bypass_transformer:
            raise UserError(
                f"{source}: this VisualBERT has {'late' if is_late else 'early'} fusion; set "
                f"encoder.config.bypass_transformer to {str(is_late).lower()}."
            )
        width = tensors[PROJECTION].shape[1] if PROJECTION in tensors else None
        if not config.with_box_numbers and width == config.feature_dim + BOX_NUMBERS:
            raise UserError(
                f"{source}: this VisualBERT reads {BOX_NUMBERS} numbers of the box behind each feature; set "
                "encoder.config.with_box_numbers to true."
            )
        return tensors, []

    def parts_to_export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> ModelWeights:
        check_encoder(model, self.needed_config, Path(path))
        parts = state_dicts(model, task_name)
        if PROJECTION not in parts.encoder:
            raise UserError(f"{path}: in such files all features are projected, also with equal sizes.")
        return parts


class OfficialVisualBert(_VisualBertFiles):
    """Models of the official VisualBERT code, in and out."""

    layout = "VisualBERT"
    suffix = ".th"
    same_config = ("num_attention_heads", "hidden_act", "layer_norm_eps", "region_position", "region_types")
    needed_config: ClassVar[dict[str, Any]] = {"region_position": "official", "region_types": [0, 1]}

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith(TRUNK) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        parts: dict[str, dict[str, Tensor]] = {TRUNK: {}, REGION_NETWORK: {}, HEAD: {}}
        for name, value in tensors.items():
            prefix = next((one for one in (TRUNK, REGION_NETWORK) if name.startswith(one)), HEAD)
            parts[prefix][name if prefix == REGION_NETWORK else name.removeprefix(prefix)] = value
        found = _converted(parts[TRUNK], parts[HEAD], ENCODER, source)
        return dataclasses.replace(found, detector=from_visual_bert(parts[REGION_NETWORK]))

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write a `.th` file; returns what was left out, see `official_state`."""
        if isinstance(model.detector, R2CNetwork):
            settings = model.detector.config.to_flat()
            check_detector(settings, OFFICIAL_NETWORK, Path(path), "configs/detector/r2c_R_50.yaml")
        state, left_out = official_state(self.parts_to_export(model, task_name, path))
        save_for_torch(on_cpu(state), path, self.suffix)
        return left_out


class VisualBertFromBert(BertStart):
    """BERT fills the parts of VisualBERT that it has, the projection stays random.

    With `special_visual_initialize` the visual tables become copies of BERT's, as in the official code. Of the heads
    BERT's sentence head is converted too; the official code loads it although its own labels have the classes swapped.
    """

    names: ClassVar[Mapping[str, str]] = {name: name for name in BERT_MODULES}
    head_names = WORD_HEAD | {"cls.seq_relationship": "relationship.head"}
    transferable = ("word_head.", "relationship.")
    required = tuple(f"{name}." for name in BERT_MODULES if name != "pooler")

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        """A BERT has no tables of regions; our own encoder has, and BERT's other names."""
        return super().recognise(tensors) and not COPIED_TABLES.values() & tensors.keys()

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Copies for the visual tables."""
        self.check_tables(tensors, encoder, source)
        if not encoder.config.special_visual_initialize:
            return tensors, []
        copies = {text: visual for text, visual in COPIED_TABLES.items() if text in tensors}
        tensors = tensors | {visual: tensors[text] for text, visual in copies.items()}
        return tensors, [f"{text} -> {visual}" for text, visual in copies.items()]


def _converted(
    trunk: Mapping[str, Tensor], head: Mapping[str, Tensor], names: Mapping[str, str], source: str | Path
) -> ModelWeights:
    """Weights under our names in float32.

    Args:
        trunk: by names that `names` translates into ours.
        head: by official names without `bert.` in front.
    """
    rows = {len(value) for name, value in head.items() if replace_module(name, CLASSIFIER) is not None}
    task_name = CLASSIFIER_ROWS.get(min(rows), ANSWERS) if rows else None
    if any(name.startswith("cls.") for name in head):
        task_name = PRETRAINING
    if any(name.startswith("flickr_attention.") for name in head):
        task_name = "flickr30k"
    rule = HEADS.get(task_name, NO_HEAD)
    unused = {module: module for module in rule.unused}
    encoder, task, head = {}, {}, as_float32(head)
    for name, value in as_float32(trunk).items():
        if (ours := replace_module(name, names)) is None:
            raise unknown_name(name, "VisualBERT", source)
        encoder[ours] = value
    for name, value in head.items():
        if (ours := replace_module(name, rule.names)) is not None:
            task[ours] = value
        elif name != DECODER and replace_module(name, unused) is None:
            raise unknown_name(name, f"VisualBERT {task_name or ''}".strip(), source)
    check_tied(head.get(DECODER), encoder, source)
    transferable = ("",) if task_name == PRETRAINING else ()
    compatible = (ANSWERS,) if task_name in CLASSIFIER_ROWS.values() else ()
    return ModelWeights({}, encoder, task, task_name, transferable, compatible_tasks=compatible)


def official_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `OfficialVisualBert.convert`.

    Returns:
        the weights by official names, and what was left out: a detector other than the network of R2C, and what else
        `_official_head` leaves out.
    """
    require_task(parts.task_name, list(HEADS), "VisualBERT")
    head, left_out = _official_head(parts)
    state = {f"{TRUNK}{replace_module(name, reverse(ENCODER))}": value for name, value in parts.encoder.items()}
    state |= {f"{HEAD}{name}": value for name, value in head.items()}
    if any(name.startswith("cls.predictions.") for name in head):
        state[f"{HEAD}{DECODER}"] = parts.encoder[WORD_EMBEDDINGS]
    if MASK_FILTER in parts.detector:
        left_out = [name for name in left_out if not name.startswith("detector.")]
        network = {visual_bert_name(name): value for name, value in parts.detector.items()}
        # a frozen norm counts no batches, and official files have the counter
        for norm in (name.removesuffix("running_var") for name in list(network) if name.endswith("running_var")):
            network.setdefault(f"{norm}num_batches_tracked", torch.zeros((), dtype=torch.int64))
        state |= network
    return state, left_out


def _official_head(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The head by official names without `bert.` in front, and what was left out.

    Left out are the detector, and side heads and objectives that no official model has (`detector.`, `task.`).
    """
    rule = HEADS.get(parts.task_name, NO_HEAD)
    head: dict[str, Tensor] = {}
    back = reverse(rule.names)
    modules = {ours.split(".")[0] for ours in back}
    left_out, missing = [f"detector.{name}" for name in parts.detector], set(back) - set(rule.optional)
    for name, value in parts.task.items():
        official = replace_module(name, back)
        if official is not None:
            head[official] = value
            missing -= {ours for ours in back if replace_module(name, {ours: ours})}
        elif name.split(".")[0] in modules:  # without it the head would compute something else
            raise UserError(f"task.{name} has no place in VisualBERT's head for {parts.task_name}.")
        else:
            left_out.append(f"task.{name}")
    if missing:
        names = ", ".join(sorted(missing))
        raise UserError(f"VisualBERT's head for {parts.task_name} has {names}, which this model lacks.")
    return head, left_out


# Folders of transformers' VisualBERT <-> names of our encoder and heads.


IN_TRANSFORMERS = "visual_bert."  # in front of the trunk
RENAMED = {"classifier": "cls", "flickr_attention": "attention"}  # official heads; the others have the same names
WORD_BIAS = "cls.predictions.bias"
WORD_BIAS_AGAIN = "cls.predictions.decoder.bias"
POSITION_IDS = "embeddings.position_ids"  # indices that old versions saved


class TransformersVisualBert(_VisualBertFiles):
    """VisualBERT of transformers with a head, in and out."""

    layout = "transformers' VisualBERT"
    suffix = ".safetensors"
    # users name the types of regions in each call; transformers' late fusion fails
    needed_config: ClassVar[dict[str, Any]] = {"region_position": "official", "bypass_transformer": False}

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        is_old_trunk = POSITION_IDS in tensors and PROJECTION in tensors
        return is_old_trunk or any(name.startswith(IN_TRANSFORMERS) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        prefix = IN_TRANSFORMERS if any(name.startswith(IN_TRANSFORMERS) for name in tensors) else ""
        trunk = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        trunk.pop(POSITION_IDS, None)
        head = {}
        for name, value in tensors.items():
            if not name.startswith(prefix):
                has_same_name = name.startswith(("cls.predictions.", "cls.seq_relationship."))
                head[name if has_same_name else replace_module(name, reverse(RENAMED)) or name] = value
        bias = head.pop(WORD_BIAS_AGAIN, None)
        if bias is not None and not torch.equal(head.setdefault(WORD_BIAS, bias), bias):
            raise UserError(f"{source}: {WORD_BIAS_AGAIN} differs from {WORD_BIAS}, which are tied.")
        return _converted(trunk, head, {name: name for name in ENCODER.values()}, source)

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write `model.safetensors` and `config.json`.

        A task that has no head in transformers gives the trunk alone (`VisualBertModel`). Users of the folder pass
        `visual_token_type_ids` as `region_types` says (transformers takes 1 if they are left out), and features that
        end with the numbers of the boxes if the encoder has `with_box_numbers`.
        """
        parts = self.parts_to_export(model, task_name, path)
        state, left_out = transformers_state(parts)
        save_for_transformers(state, transformers_config(model.encoder, parts), path)
        return left_out


def transformers_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `TransformersVisualBert.convert`; what is tied to something else is left to transformers.

    Returns:
        the weights by transformers' names, and what was left out, see `_official_head`.
    """
    head, left_out = _official_head(parts)
    prefix = IN_TRANSFORMERS if parts.task_name in HEADS else ""
    state = {f"{prefix}{name}": value for name, value in parts.encoder.items()}
    return state | {replace_module(name, RENAMED) or name: value for name, value in head.items()}, left_out


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

"""Names of official VisualBERT checkpoints (`*.th`) <-> names of our encoder and heads; and a BERT as its start.

A file is a bare state dict: `bert.bert.` is the trunk, `bert.` in front of other names a head, and in files of VCR
`detector.` the network of regions, whose names are in `detector.weight_names`. Our encoder has the names of
transformers' VisualBERT.

Facts from the official code (uclanlp/visualbert); the published files themselves were not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.visual_bert.configuration_visual_bert import VisualBertConfig

from detector.errors import UserError
from detector.io import atomic_file, atomic_files
from detector.r2c import R2CNetwork
from detector.structures import Detector
from detector.weight_names import REGION_NETWORK, from_visual_bert, visual_bert_name
from e2e_vl.encoders.visual_bert import BOX_NUMBERS, VisualBertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import ModelWeights, WeightAdapter, replace_module, require_transformers_name
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
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
COPIED_TABLES = {  # text -> visual, see `special_visual_initialize`
    "embeddings.token_type_embeddings.weight": "embeddings.visual_token_type_embeddings.weight",
    "embeddings.position_embeddings.weight": "embeddings.visual_position_embeddings.weight",
}
DECODER = "cls.predictions.decoder.weight"  # the word table again
ENCODER_CONFIG = {"region_position": "official", "region_types": [0, 1]}
PRETRAINING = "pretraining"  # our name of the task


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
# Our name of a task -> its head. Files of tasks that have none of these heads yet are converted too; the task's own
# code decides whether its head has these parts.
HEADS = {
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


class OfficialVisualBert(WeightAdapter):
    """Models of the official VisualBERT code, in and out."""

    layout = "VisualBERT"
    suffix = ".th"
    same_config = ("num_attention_heads", "hidden_act", "layer_norm_eps", "region_position", "region_types")

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith(TRUNK) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """Take an official state dict apart, cast to float32.

        Raises:
            ValueError: a name that no official model has, or a decoder that is not the word table.
        """
        trunk = {name.removeprefix(TRUNK): value for name, value in tensors.items() if name.startswith(TRUNK)}
        head = {
            name.removeprefix(HEAD): value
            for name, value in tensors.items()
            if not name.startswith((TRUNK, REGION_NETWORK))
        }
        network = {name: value for name, value in tensors.items() if name.startswith(REGION_NETWORK)}
        found = converted(trunk, head, ENCODER, source)
        return dataclasses.replace(found, detector=from_visual_bert(network, source) if network else {})

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """See `check_architecture`."""
        check_architecture(tensors, encoder, source)
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write a `.th` file; returns what was left out, see `official_state`.

        Raises:
            ValueError: the official code has no such model, or the file's name does not end with `.th`.
        """
        path = Path(path)
        if path.suffix != self.suffix:
            raise UserError(f"{path}: official VisualBERT files are named *{self.suffix}.")
        _check_network(model.detector, path)
        state, left_out = official_state(parts_of(model, task_name, path, ENCODER_CONFIG))
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part, part.open("wb") as file:
            torch.save({name: value.detach().cpu() for name, value in state.items()}, file)
        return left_out


class VisualBertFromBert(BertStart):
    """BERT fills the parts of VisualBERT that it has, the projection stays random.

    With `special_visual_initialize` the visual tables become copies of BERT's, as in the official code. Of the heads
    BERT's sentence head is converted too; the official code loads it although its own labels have the classes swapped.
    """

    names = {name: name for name in BERT_MODULES}  # noqa: RUF012
    head_names = WORD_HEAD | {"cls.seq_relationship": "relationship.head"}
    transferable = ("word_head.", "relationship.")
    brings = tuple(f"{name}." for name in BERT_MODULES if name != "pooler")

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        """A BERT has no tables of regions; our own encoder has, and BERT's other names."""
        return super().recognise(tensors) and not COPIED_TABLES.values() & tensors.keys()

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Copies for the visual tables. Raises ValueError as `check_tables` does."""
        self.check_tables(tensors, encoder, source)
        if not encoder.config.special_visual_initialize:
            return tensors, []
        copies = {text: visual for text, visual in COPIED_TABLES.items() if text in tensors}
        tensors = tensors | {visual: tensors[text] for text, visual in copies.items()}
        return tensors, [f"{text} -> {visual}" for text, visual in copies.items()]


# What both formats share


def check_architecture(tensors: Mapping[str, Tensor], encoder: nn.Module, source: str | Path) -> None:
    """Raises ValueError, with the setting to change, for a fusion or for features other than the encoder's."""
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


def converted(
    trunk: Mapping[str, Tensor], head: Mapping[str, Tensor], names: Mapping[str, str], source: str | Path
) -> ModelWeights:
    """Weights by our names, cast to float32.

    Args:
        trunk: by names that `names` translates into ours.
        head: by official names without `bert.` in front.

    Raises:
        ValueError: see `OfficialVisualBert.convert`.
    """
    task_name = _task_of(head)
    rule = HEADS.get(task_name, NO_HEAD)
    encoder, task = {}, {}
    for name, value in trunk.items():
        ours = replace_module(name, names)
        if ours is None:
            raise UserError(f"{source}: {name} is no name of a VisualBERT model.")
        encoder[ours] = _float(value)
    for name, value in head.items():
        if (ours := replace_module(name, rule.names)) is not None:
            task[ours] = _float(value)
        elif name != DECODER and replace_module(name, {module: module for module in rule.unused}) is None:
            for_task = f" for {task_name}" if task_name else ""
            raise UserError(f"{source}: {name} is no name of a VisualBERT model{for_task}.")
    words = encoder.get(WORD_EMBEDDINGS)
    if DECODER in head and (words is None or not torch.equal(_float(head[DECODER]), words)):
        raise UserError(f"{source}: {DECODER} differs from {WORD_EMBEDDINGS}; the file is damaged.")
    return ModelWeights(
        {},
        encoder,
        task,
        task_name,
        transferable=("",) if task_name == PRETRAINING else (),
        compatible_tasks=(ANSWERS,) if task_name in CLASSIFIER_ROWS.values() else (),
    )


def _float(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _task_of(head: Mapping[str, Tensor]) -> str | None:
    """Our name of the task that has such a head, by official names."""
    if any(name.startswith("flickr_attention.") for name in head):
        return "flickr30k"
    if any(name.startswith("cls.") for name in head):
        return PRETRAINING
    rows = {len(value) for name, value in head.items() if replace_module(name, CLASSIFIER) is not None}
    return CLASSIFIER_ROWS.get(min(rows), ANSWERS) if rows else None


def parts_of(model: VisionLanguageModel, task_name: str, path: Path, config: Mapping[str, Any]) -> ModelWeights:
    """The weights of a model of ours.

    Args:
        config: fields of the encoder's config, with their values in the other project.

    Raises:
        ValueError: the other project does not have such an encoder.
    """
    if not isinstance(model.encoder, VisualBertEncoder):
        raise UserError(f"{path}: the encoder is a {type(model.encoder).__name__}, not VisualBERT.")
    settings = model.encoder.config
    for name, value in config.items():
        if getattr(settings, name) != value:
            raise UserError(f"{path}: such files have no encoder with {name} = {getattr(settings, name)}.")
    if PROJECTION not in model.encoder.state_dict():
        raise UserError(f"{path}: in such files all features are projected, also with equal sizes.")
    detector, encoder, task = (dict(part.state_dict()) for part in (model.detector, model.encoder, model.task))
    return ModelWeights(detector, encoder, task, task_name)


def official_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `OfficialVisualBert.convert`.

    Returns:
        the weights by official names, and what was left out: a detector other than the network of R2C, and what else
        `head_of` leaves out.

    Raises:
        ValueError: no official model has such a task, or such a head for it.
    """
    if parts.task_name not in HEADS:
        known = ", ".join(HEADS)
        raise UserError(f"There is no official VisualBERT model for the task '{parts.task_name}', only for {known}.")
    head, left_out = head_of(parts)
    back = {ours: official for official, ours in ENCODER.items()}
    state = {f"{TRUNK}{replace_module(name, back)}": value for name, value in parts.encoder.items()}
    state |= {f"{HEAD}{name}": value for name, value in head.items()}
    if any(name.startswith("cls.predictions.") for name in head):
        state[f"{HEAD}{DECODER}"] = parts.encoder[WORD_EMBEDDINGS]
    if MASK_FILTER in parts.detector:
        state |= _official_network(parts.detector)
        left_out = [name for name in left_out if not name.startswith("detector.")]
    return state, left_out


def _official_network(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network of R2C by official names; a frozen norm counts no batches, and official files have the counter."""
    state = {visual_bert_name(name): value for name, value in tensors.items()}
    counters = (name.removesuffix("running_var") for name in list(state) if name.endswith("running_var"))
    for norm in counters:
        state.setdefault(f"{norm}num_batches_tracked", torch.zeros((), dtype=torch.int64))
    return state


def _check_network(detector: Detector, path: Path) -> None:
    """Raises ValueError if the network of R2C has other settings than the official one, that no weight shows."""
    if not isinstance(detector, R2CNetwork):
        return
    own = detector.config.to_flat()
    wrong = [key for key, value in OFFICIAL_NETWORK.items() if own[key] != value]
    if wrong:
        raise UserError(
            f"{path}: the official network of regions has {wrong[0]} {OFFICIAL_NETWORK[wrong[0]]}, not "
            f"{own[wrong[0]]}, and would give other features from the same weights; train with "
            "configs/detector/r2c_R_50.yaml."
        )


def head_of(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The head by official names without `bert.` in front, and what was left out.

    Left out are the detector, and side heads and objectives that no official model has (`detector.`, `task.`).

    Raises:
        ValueError: the official head of this task is another one.
    """
    rule = HEADS.get(parts.task_name, NO_HEAD)
    head: dict[str, Tensor] = {}
    back = {ours: official for official, ours in rule.names.items()}
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


TRANSFORMERS_CONFIG = {"region_position": "official"}  # users name the types of regions in each call
TRANSFORMERS_TRUNK = "visual_bert."
RENAMED = {"classifier": "cls", "flickr_attention": "attention"}  # official heads; the others have the same names
WORD_BIAS = "cls.predictions.bias"
WORD_BIAS_AGAIN = "cls.predictions.decoder.bias"
POSITION_IDS = "embeddings.position_ids"  # indices that old versions saved


class TransformersVisualBert(WeightAdapter):
    """VisualBERT of transformers with a head, in and out."""

    layout = "transformers' VisualBERT"
    suffix = ".safetensors"

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        is_old_trunk = POSITION_IDS in tensors and PROJECTION in tensors
        return is_old_trunk or any(name.startswith(TRANSFORMERS_TRUNK) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """Take a state dict apart, cast to float32.

        Raises:
            ValueError: a name that no VisualBERT has, or a decoder that is not the word table.
        """
        prefix = TRANSFORMERS_TRUNK if any(name.startswith(TRANSFORMERS_TRUNK) for name in tensors) else ""
        trunk = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        trunk.pop(POSITION_IDS, None)
        head = {_official(name): value for name, value in tensors.items() if not name.startswith(prefix)}
        bias = head.pop(WORD_BIAS_AGAIN, None)
        if bias is not None and not torch.equal(head.setdefault(WORD_BIAS, bias), bias):
            raise UserError(f"{source}: {WORD_BIAS_AGAIN} differs from {WORD_BIAS}; the file is damaged.")
        return converted(trunk, head, {name: name for name in ENCODER.values()}, source)

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """See `check_architecture`."""
        check_architecture(tensors, encoder, source)
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write `model.safetensors`, and beside it the `config.json` with which transformers reads the folder.

        A task that has no head in transformers gives the trunk alone (`VisualBertModel`). Users of the folder pass
        `visual_token_type_ids` as `region_types` says (transformers takes 1 if they are left out), and features that
        end with the numbers of the boxes if the encoder has `with_box_numbers`.

        Returns:
            names (`detector.`, `task.`) of what was left out.

        Raises:
            ValueError: transformers has no such model, or the file has another name.
        """
        path = Path(path)
        require_transformers_name(path)
        parts = parts_of(model, task_name, path, TRANSFORMERS_CONFIG)
        if model.encoder.config.bypass_transformer:
            raise UserError(f"{path}: transformers' late fusion (bypass_transformer) fails; write a .th file.")
        state, left_out = transformers_state(parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        with atomic_files(path.parent, "config.json") as part:
            save_file(tensors, part / path.name, metadata={"format": "pt"})
            transformers_config(model.encoder, parts).save_pretrained(part)
        return left_out


def transformers_state(parts: ModelWeights) -> tuple[dict[str, Tensor], list[str]]:
    """The reverse of `TransformersVisualBert.convert`; what is tied to something else is left to transformers.

    Returns:
        the weights by transformers' names, and what was left out, see `head_of`.

    Raises:
        ValueError: transformers' model for this task has another head.
    """
    head, left_out = head_of(parts)
    prefix = TRANSFORMERS_TRUNK if parts.task_name in HEADS else ""
    state = {f"{prefix}{name}": value for name, value in parts.encoder.items()}
    return state | {replace_module(name, RENAMED) or name: value for name, value in head.items()}, left_out


def transformers_config(encoder: VisualBertEncoder, parts: ModelWeights) -> VisualBertConfig:
    """The settings that both projects have. No row of the word table is padding, as in the official code."""
    rule, own = HEADS.get(parts.task_name, NO_HEAD), encoder.config.to_dict()
    shared = {field.name for field in dataclasses.fields(VisualBertConfig)} & own.keys()
    fields = {name: own[name] for name in shared - {"architectures", "model_type", "pad_token_id"}}
    if rule.counts_labels:
        fields["num_labels"] = len(parts.task["head.output.weight"])
    return VisualBertConfig(
        **fields,
        visual_embedding_dim=encoder.config.visual_embedding_dim,
        pad_token_id=None,
        architectures=[rule.architecture],
    )


def _official(name: str) -> str:
    """The official name of a parameter of a head."""
    if name.startswith(("cls.predictions.", "cls.seq_relationship.")):
        return name
    return replace_module(name, {theirs: official for official, theirs in RENAMED.items()}) or name

"""Convert checkpoints of the official LXMERT code and of transformers, and initialise LXMERT from BERT.

Our encoder has the parameter names of transformers' `LxmertModel`. Other names and prefixes:

    `*_LXRT.pth` (pre-training)            `bert.*`, `cls.*`, `obj_predict_head.*`, `answer_head.*`
    `BEST.pth`, `LAST.pth` (fine-tuned)    `lxrt_encoder.model.bert.*`, `logit_fc.*`
    `LxmertForPreTraining`                 `lxmert.*`, heads as in pre-training
    `LxmertForQuestionAnswering`           `lxmert.*`, `answer_head.*`

Official files from training on several GPUs have the prefix `module.`; in fine-tuned models it follows
`lxrt_encoder.model.`. A checkpoint of transformers' `LxmertModel` has our names and needs no adapter.

The names follow the official code (airsplay/lxmert).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.lxmert.configuration_lxmert import LxmertConfig
from typing_extensions import override

from detector.checkpoint import save_weights
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import (
    PRETRAINING,
    WORD_EMBEDDINGS,
    WORD_HEAD,
    BertStart,
    ModelWeights,
    WeightAdapter,
    check_settings,
    check_task,
    rename_head,
    save_as_transformers,
    shared_fields,
    split_weights,
)

ANSWERING = ("vqa", "gqa")  # tasks with the same head over a list of answers
PAIRS = "nlvr2"  # its head reads the summaries of two images
FINE_TUNED = "lxrt_encoder.model."
ENCODER = {
    "bert.embeddings": "embeddings",  # official
    "bert.encoder": "encoder",
    "bert.pooler": "pooler",
    "lxmert.embeddings": "embeddings",  # of transformers
    "lxmert.encoder": "encoder",
    "lxmert.pooler": "pooler",
}
FINE_TUNED_HEAD = {
    "logit_fc.0": "head.transform.dense",
    "logit_fc.2": "head.transform.norm",
    "logit_fc.3": "head.output",
}
QUESTION_ANSWERING_HEAD = {f"answer_head.{name}": ours for name, ours in FINE_TUNED_HEAD.items()}  # transformers
PRETRAINING_HEADS = {
    **WORD_HEAD,
    "cls.seq_relationship": "relationship.head",
    "obj_predict_head.transform.dense": "region_transform.dense",
    "obj_predict_head.transform.LayerNorm": "region_transform.norm",
    "obj_predict_head.decoder_dict.obj": "object_labels.output",
    "obj_predict_head.decoder_dict.attr": "attribute_labels.output",
    "obj_predict_head.decoder_dict.feat": "region_features.output",
    **{name: f"image_qa.{ours}" for name, ours in QUESTION_ANSWERING_HEAD.items()},
}
OFFICIAL_HEADS = {PRETRAINING: PRETRAINING_HEADS, **dict.fromkeys((*ANSWERING, PAIRS), FINE_TUNED_HEAD)}
SEGMENTS = "embeddings.token_type_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"  # tied to the word embeddings
CROSS = ".visual_attention."
OTHER_CROSS = ".text_attention."
OFFICIAL_CONFIG = {
    "cross_attention": "shared",
    "with_segments": True,
    "with_lstm": False,
    "pooling": "tanh",
    "uses_whole_image": False,
    "named_regions": False,
    "relative_geometry": False,
    "proposal_scores": False,
}


class OfficialLxmert(WeightAdapter):
    """Converts checkpoints of the official LXMERT code."""

    layout = "LXMERT"
    suffix = ".pth"
    question_configs: ClassVar[Mapping[str, str]] = {"vqa": "vqa/lxmert_pixels", "nlvr2": "nlvr2/lxmert_pixels"}
    checked_fields = ("num_attention_heads", "hidden_act", "layer_norm_eps")
    segment_tables = (SEGMENTS,)

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        starts = (FINE_TUNED, "bert.encoder.visn_fc.")
        return any(name.removeprefix("module.").startswith(starts) for name in tensors)

    @override
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        plain = {}
        for name, value in tensors.items():
            plain[name.removeprefix("module.").removeprefix(FINE_TUNED).removeprefix("module.")] = value
        # a head over answers is taken for the first task that has one, see `compatible_tasks`
        hidden = plain.get("logit_fc.0.weight")
        if any(name.startswith(("cls.", "obj_predict_head.")) for name in plain):
            task_name = PRETRAINING
            names = PRETRAINING_HEADS
        elif hidden is not None:
            task_name = PAIRS if hidden.shape[0] == hidden.shape[1] else ANSWERING[0]
            names = FINE_TUNED_HEAD
        else:
            has_answers = any(name.startswith("answer_head.") for name in plain)
            task_name = ANSWERING[0] if has_answers else None
            names = QUESTION_ANSWERING_HEAD
        encoder, head = split_weights(plain, ENCODER, names, source)
        transferable = ("",) if task_name == PRETRAINING else ()
        compatible = ANSWERING if task_name in ANSWERING else ()
        return ModelWeights({}, encoder, head, task_name, transferable, compatible_tasks=compatible)

    @override
    def adapt(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Copy shared cross attention to both directions if the encoder separates them; drop what it does not have."""
        copied = []
        if encoder.config.cross_attention == "separate":
            tensors |= {name.replace(CROSS, OTHER_CROSS): value for name, value in tensors.items() if CROSS in name}
            copied.append("visual_attention -> text_attention")
        return _without_absent(tensors, encoder), copied

    @override
    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a file with the parameter names of `*_LXRT.pth` or `BEST.pth`; return the parameters left out."""
        check_task(task_name, list(OFFICIAL_HEADS), "LXMERT")
        check_settings(model.encoder.config.to_dict(), OFFICIAL_CONFIG, path)
        weights = ModelWeights.of_model(model, task_name)
        save_weights(to_official(weights), path, key="")
        _, left_out = rename_head(weights.task, OFFICIAL_HEADS[task_name])
        return left_out + [f"detector.{name}" for name in weights.detector]


def to_official(weights: ModelWeights) -> dict[str, Tensor]:
    """Invert `OfficialLxmert.convert`: return weights with official names, without `module.`."""
    prefix = "" if weights.task_name == PRETRAINING else FINE_TUNED
    official = {f"{prefix}bert.{name}": value for name, value in weights.encoder.items()}
    head, _ = rename_head(weights.task, OFFICIAL_HEADS[weights.task_name])
    official |= head
    if "word_head.bias" in weights.task:
        official[DECODER] = weights.encoder[WORD_EMBEDDINGS]
    return official


def _without_absent(tensors: Mapping[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    """Drop the segment table and the pooler if the encoder does not have them."""
    absent: tuple[str, ...] = ()
    if not encoder.config.with_segments:
        absent += (SEGMENTS,)
    if encoder.config.pooling != "tanh":
        absent += ("pooler.",)
    return {name: value for name, value in tensors.items() if not name.startswith(absent)}


class LxmertFromBert(BertStart):
    """Initialises the layers over words from BERT's first layers (official code) or last layers (paper).

    The layers over regions, the cross attention and the region embeddings stay random.
    """

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        """Recognise BERT, but not our encoder, which has the same names for words."""
        return super().recognises(tensors) and not any(name.startswith("encoder.visn_fc.") for name in tensors)

    @override
    def adapt(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Take as many of BERT's layers as the encoder has over words, and count them from 0."""
        pattern = re.compile(r"encoder\.layer\.(\d+)\.(.*)")
        num_layers = encoder.config.l_layers
        adapted: dict[str, Tensor] = {}
        of_layers: list[tuple[int, str, Tensor]] = []  # number of a layer, name in it, value
        for name, value in tensors.items():
            match = pattern.fullmatch(name)
            if match is None:
                adapted[name] = value
            else:
                of_layers.append((int(match[1]), match[2], value))
        count = max((layer for layer, _, _ in of_layers), default=-1) + 1
        which = encoder.config.bert_layers
        first = 0
        if which == "last":
            first = max(count - num_layers, 0)
        for layer, name, value in of_layers:
            if first <= layer < first + num_layers:
                adapted[f"encoder.layer.{layer - first}.{name}"] = value
        copied = []
        if count > num_layers:
            copied.append(f"the {which} {num_layers} of BERT's {count} layers -> encoder.layer")
        return _without_absent(adapted, encoder), copied


# Folders of transformers' LXMERT

TRUNK = "lxmert."
LOSS_NORMALISER = 1 / 0.15  # as in the official code; transformers' default is 6.67
TRANSFORMERS_CONFIG = {  # values of our config that transformers' model implements
    "max_images": 1,
    "named_regions": False,
    "cross_attention": "shared",
    "relative_geometry": False,
    "proposal_scores": False,
    "with_segments": True,
    "with_lstm": False,
    "pooling": "tanh",
    "layer_norm_eps": 1e-12,
}
# Parts of the pre-training heads (our module names); a part is exported if all its modules exist.
WORDS = ("word_head.transform.dense", "word_head.transform.norm", "word_head.bias", "relationship.head")
TRANSFORM = ("region_transform.dense", "region_transform.norm")
REGIONS = {"obj": "object_labels.output", "attr": "attribute_labels.output", "feat": "region_features.output"}
ANSWERS = tuple(FINE_TUNED_HEAD.values())
QUESTIONS = tuple(f"image_qa.{module}" for module in ANSWERS)


class TransformersLxmert(OfficialLxmert):
    """Checkpoints of transformers' LXMERT with a head."""

    layout = "transformers' LXMERT"
    suffix = ".safetensors"

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith(f"{TRUNK}encoder.visn_fc.") for name in tensors)

    @override
    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a folder's `model.safetensors` and `config.json`.

        The architecture is `LxmertForPreTraining` for pre-training and `LxmertForQuestionAnswering` for VQA and GQA.
        Other tasks, heads whose shape differs from transformers', and pre-training without masked words or matching
        give the trunk alone (`LxmertModel`). Its users must divide boxes (xyxy) by the width and height of the image.
        """
        check_settings(model.encoder.config.to_dict(), TRANSFORMERS_CONFIG, path)
        config = model.encoder.config
        weights = ModelWeights.of_model(model, task_name)
        modules, fields = _head_for_transformers(weights, config.hidden_size, config.hidden_act)
        all_names = PRETRAINING_HEADS if task_name == PRETRAINING else QUESTION_ANSWERING_HEAD
        names = {theirs: ours for theirs, ours in all_names.items() if ours in modules}
        head, left_out = rename_head(weights.task, names)
        prefix = TRUNK if modules else ""
        state = {f"{prefix}{name}": value for name, value in weights.encoder.items()} | head
        fields = shared_fields(config, LxmertConfig) | fields
        folder_config = LxmertConfig(**fields, visual_feat_dim=config.feature_dim, visual_pos_dim=4)
        save_as_transformers(state, folder_config, path)
        return left_out + [f"detector.{name}" for name in weights.detector]


def _head_for_transformers(
    weights: ModelWeights, hidden_size: int, hidden_act: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the modules that transformers' model for this task also has, and the fields of its config for them."""
    task = weights.task
    present = {*task, *(name.rpartition(".")[0] for name in task)}

    def has_answers(modules: tuple[str, ...]) -> bool:
        """Return whether the head has transformers' hidden layer of twice the width."""
        return present.issuperset(modules) and len(task[f"{modules[0]}.weight"]) == 2 * hidden_size

    if weights.task_name in ANSWERING and has_answers(ANSWERS):
        rows = len(task["head.output.weight"])
        return ANSWERS, {"num_qa_labels": rows, "architectures": ["LxmertForQuestionAnswering"]}
    # the word head's activation is the encoder's in transformers and always GELU here
    if weights.task_name != PRETRAINING or not present.issuperset(WORDS) or hidden_act != "gelu":
        return (), {"architectures": ["LxmertModel"]}
    outputs = {kind: module for kind, module in REGIONS.items() if present.issuperset((*TRANSFORM, module))}
    with_answers = has_answers(QUESTIONS)
    modules = [*WORDS]
    fields: dict[str, Any] = {f"visual_{kind}_loss": kind in outputs for kind in REGIONS}
    if outputs:
        modules += [*TRANSFORM, *outputs.values()]
    for kind, field in (("obj", "num_object_labels"), ("attr", "num_attr_labels")):
        if kind in outputs:
            fields[field] = len(task[f"{outputs[kind]}.weight"])
    if with_answers:
        modules += QUESTIONS
        fields["num_qa_labels"] = len(task["image_qa.head.output.weight"])
    return tuple(modules), fields | {
        "task_obj_predict": bool(outputs),
        "task_qa": with_answers,
        "visual_loss_normalizer": LOSS_NORMALISER,
        "architectures": ["LxmertForPreTraining"],
    }

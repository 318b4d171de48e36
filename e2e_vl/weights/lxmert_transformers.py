"""Folders of transformers' LXMERT <-> names of our encoder and heads.

Our encoder has the names of transformers' `LxmertModel`, whose folders need no adapter. Models with a head have
`lxmert.` in front of them; the names of their heads are the official ones, see `e2e_vl.weights.lxmert`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers.models.lxmert.configuration_lxmert import LxmertConfig

from detector.errors import UserError
from e2e_vl.encoders.lxmert import LxmertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import replace_module, require_transformers_name
from e2e_vl.weights.lxmert import (
    ANSWERING,
    PRETRAINING,
    PRETRAINING_HEADS,
    QUESTION_ANSWERING_HEAD,
    OfficialLxmert,
)
from e2e_vl.whole_files import whole_parts

TRUNK = "lxmert."
ACTIVATION, NORM_EPS = "gelu", 1e-12  # of transformers' heads and of all its LayerNorms
LOSS_NORMALISER = 1 / 0.15  # the official code's; transformers' default is 6.67
# Fields of the encoder's config that transformers' model does not have, with the value that it computes, and why.
LIMITS: dict[str, tuple[Any, str]] = {
    "image_slots": (1, "reads one image per text"),
    "named_regions": (False, "does not link words to regions"),
    "cross_attention": ("shared", "has one shared module for both directions of the cross attention"),
    "relative_geometry": (False, "does not have a bias from the relative places of regions"),
    "with_segments": (True, "always adds a segment vector to words"),
    "pooled": ("tanh", "always has a pooler"),
    "layer_norm_eps": (NORM_EPS, f"has the epsilon {NORM_EPS} in all LayerNorms"),
}
# Parts of the heads of pre-training; a part goes along if all its modules (our names) are there.
WORDS = ("word_head.transform.dense", "word_head.transform.norm", "word_head.bias", "relationship.head")
TRANSFORM = ("region_transform.dense", "region_transform.norm")
REGIONS = {"obj": "object_labels.output", "attr": "attribute_labels.output", "feat": "region_features.output"}
QUESTIONS = ("image_qa.head.transform.dense", "image_qa.head.transform.norm", "image_qa.head.output")
ANSWERS = ("head.transform.dense", "head.transform.norm", "head.output")


@dataclasses.dataclass(frozen=True)
class FolderContent:
    """What one of transformers' folders holds."""

    state: dict[str, Tensor]  # by transformers' names
    fields: dict[str, Any]  # of `LxmertConfig`, which say what heads there are
    left_out: list[str]  # our names (`task.`) of what transformers' model has no place for


class TransformersLxmert(OfficialLxmert):
    """LXMERT of transformers with a head, in and out."""

    layout = "transformers' LXMERT"
    suffix = ".safetensors"

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.startswith(f"{TRUNK}encoder.visn_fc.") for name in tensors)

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write `model.safetensors`, and beside it the `config.json` with which transformers reads the folder.

        Pre-training gives `LxmertForPreTraining`, VQA and GQA `LxmertForQuestionAnswering`. The trunk alone
        (`LxmertModel`) is written for other tasks, for heads of another shape than transformers', and for a
        pre-training without masked words or matching. Users of the folder pass boxes as x1, y1, x2, y2 over the width
        and height of the image.

        Returns:
            names (`detector.`, `task.`) of what was left out.

        Raises:
            ValueError: transformers has no such encoder, or the file has another name.
        """
        path = Path(path)
        require_transformers_name(path)
        if not isinstance(model.encoder, LxmertEncoder):
            raise UserError(f"{path}: the encoder is a {type(model.encoder).__name__}, not LXMERT.")
        check_limits(model.encoder, path)
        content = folder_content(model, task_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in content.state.items()}
        with whole_parts(path.parent, "config.json") as part:
            save_file(tensors, part / path.name, metadata={"format": "pt"})
            folder_config(model.encoder, content.fields).save_pretrained(part)
        return [f"detector.{name}" for name in model.detector.state_dict()] + content.left_out


def check_limits(encoder: LxmertEncoder, path: Path) -> None:
    """Raises ValueError if transformers' model would compute something else with the same weights."""
    for name, (needed, reason) in LIMITS.items():
        if (own := getattr(encoder.config, name)) != needed:
            raise UserError(
                f"{path}: transformers' LXMERT {reason}, and encoder.config.{name} of this model is {own}; "
                f"only models with {name} = {needed} can be written for transformers."
            )


def folder_content(model: VisionLanguageModel, task_name: str) -> FolderContent:
    """The weights of an encoder and a head by transformers' names; the word table is not repeated as decoder."""
    encoder, task = dict(model.encoder.state_dict()), dict(model.task.state_dict())
    taken, fields = _heads_of(task, task_name, model.encoder)
    names = PRETRAINING_HEADS if task_name == PRETRAINING else QUESTION_ANSWERING_HEAD
    back = {ours: theirs for theirs, ours in names.items() if ours in taken}
    prefix = TRUNK if taken else ""
    state, left_out = {f"{prefix}{name}": value for name, value in encoder.items()}, []
    for name, value in task.items():
        if (theirs := replace_module(name, back)) is None:
            left_out.append(f"task.{name}")
        else:
            state[theirs] = value
    return FolderContent(state, fields, left_out)


def _heads_of(
    task: Mapping[str, Tensor], task_name: str, encoder: LxmertEncoder
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Our modules that transformers' model for this task has too, and the fields of its config that say so."""
    size, trunk_alone = encoder.config.hidden_size, ((), {"architectures": ["LxmertModel"]})

    def has(*modules: str) -> bool:
        return all(any(replace_module(name, {module: ""}) is not None for name in task) for module in modules)

    def answers(modules: tuple[str, ...]) -> bool:
        """The head has transformers' hidden layer, of twice the width."""
        return has(*modules) and task[f"{modules[0]}.weight"].shape == (2 * size, size)

    if task_name in ANSWERING and answers(ANSWERS):
        rows = len(task["head.output.weight"])
        return ANSWERS, {"num_qa_labels": rows, "architectures": ["LxmertForQuestionAnswering"]}
    # transformers' transform of words has the encoder's activation, ours always GELU
    if task_name != PRETRAINING or not has(*WORDS) or encoder.config.hidden_act != ACTIVATION:
        return trunk_alone
    outputs = {kind: module for kind, module in REGIONS.items() if has(*TRANSFORM, module)}
    with_answers = answers(QUESTIONS)
    taken = (*WORDS, *(TRANSFORM if outputs else ()), *outputs.values(), *(QUESTIONS if with_answers else ()))
    fields = {f"visual_{kind}_loss": kind in outputs for kind in REGIONS}
    counts = {"obj": "num_object_labels", "attr": "num_attr_labels"}
    fields |= {field: len(task[f"{outputs[kind]}.weight"]) for kind, field in counts.items() if kind in outputs}
    if with_answers:
        fields["num_qa_labels"] = len(task["image_qa.head.output.weight"])
    return taken, fields | {
        "task_obj_predict": bool(outputs),
        "task_qa": with_answers,
        "visual_loss_normalizer": LOSS_NORMALISER,
        "architectures": ["LxmertForPreTraining"],
    }


def folder_config(encoder: LxmertEncoder, fields: Mapping[str, Any]) -> LxmertConfig:
    """The settings that both projects have, and those of the heads."""
    own = encoder.config.to_dict()
    shared = {field.name for field in dataclasses.fields(LxmertConfig)} & own.keys()
    shared -= {"architectures", "model_type"}
    return LxmertConfig(
        **{name: own[name] for name in shared}, visual_feat_dim=encoder.config.feature_dim, visual_pos_dim=4, **fields
    )

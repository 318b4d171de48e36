"""Files of the official LXMERT code <-> names of our encoder and heads.

Our encoder has the names of transformers' `LxmertModel`, so only prefixes change:

    `*_LXRT.pth` (pre-training)            `bert.*`, `cls.*`, `obj_predict_head.*`, `answer_head.*`
    `BEST.pth`, `LAST.pth` (fine-tuned)    `lxrt_encoder.model.bert.*`, `logit_fc.*`
    `LxmertForPreTraining`                 `lxmert.*`, heads as in pre-training
    `LxmertForQuestionAnswering`           `lxmert.*`, `answer_head.*`

Files that the official code wrote on several GPUs have `module.` in front of all names, fine-tuned ones after
`lxrt_encoder.model.`. The files of transformers, which `e2e_vl.weights.lxmert` tells and writes, are taken
apart here too; a file of its bare `LxmertModel` has our own names and needs no adapter.

Facts from the official code (airsplay/lxmert).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.lxmert.configuration_lxmert import LxmertConfig

from detector.errors import UserError
from detector.io import atomic_file, atomic_files
from e2e_vl.encoders.lxmert import LxmertEncoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.weights.base import ModelWeights, WeightAdapter, replace_module, require_transformers_name
from e2e_vl.weights.bert import ENCODER as BERT_IN_SEQUENCE
from e2e_vl.weights.bert import BertStart

PRETRAINING = "pretraining"  # our name of the task
ANSWERING = ("vqa", "gqa")  # ours with the same head over a list of answers
PAIRS = "nlvr2"  # ours whose head reads the summaries of two images
FINE_TUNED = "lxrt_encoder.model."
# official or transformers' prefix -> ours
ENCODER = {"bert": "", "lxmert": ""}
PRETRAINING_HEADS = {
    "cls.predictions.transform.dense": "word_head.transform.dense",
    "cls.predictions.transform.LayerNorm": "word_head.transform.norm",
    "cls.predictions.bias": "word_head.bias",
    "cls.seq_relationship": "relationship.head",
    "obj_predict_head.transform.dense": "region_transform.dense",
    "obj_predict_head.transform.LayerNorm": "region_transform.norm",
    "obj_predict_head.decoder_dict.obj": "object_labels.output",
    "obj_predict_head.decoder_dict.attr": "attribute_labels.output",
    "obj_predict_head.decoder_dict.feat": "region_features.output",
    "answer_head.logit_fc.0": "image_qa.head.transform.dense",
    "answer_head.logit_fc.2": "image_qa.head.transform.norm",
    "answer_head.logit_fc.3": "image_qa.head.output",
}
FINE_TUNED_HEAD = {
    "logit_fc.0": "head.transform.dense",
    "logit_fc.2": "head.transform.norm",
    "logit_fc.3": "head.output",
}
QUESTION_ANSWERING_HEAD = {f"answer_head.{name}": ours for name, ours in FINE_TUNED_HEAD.items()}  # transformers
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
SEGMENTS = "embeddings.token_type_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"  # the word table again
CROSS, OTHER_CROSS = ".visual_attention.", ".text_attention."
OFFICIAL = {
    "cross_attention": "shared",
    "with_segments": True,
    "pooled": "tanh",
    "uses_whole_image": False,
    "named_regions": False,
    "relative_geometry": False,
}


class OfficialLxmert(WeightAdapter):
    """Models of the official LXMERT code, in and out."""

    layout = "LXMERT"
    suffix = ".pth"
    same_config = ("num_attention_heads", "hidden_act", "layer_norm_eps")
    segment_tables = (SEGMENTS,)

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        starts = (FINE_TUNED, "bert.encoder.visn_fc.")
        return any(name.removeprefix("module.").startswith(starts) for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """Take a state dict apart, official or transformers', cast to float32.

        Raises:
            ValueError: a name that no LXMERT has, or a decoder of words that is not the word table.
        """
        plain = {_plain(name): value.float() if value.is_floating_point() else value for name, value in tensors.items()}
        task_name, names = _head_of(plain)
        encoder, head = {}, {}
        for name, value in plain.items():
            prefix, _, rest = name.partition(".")
            if prefix in ENCODER and rest.startswith(("embeddings.", "encoder.", "pooler.")):
                encoder[rest] = value
            elif (ours := replace_module(name, names)) is not None:
                head[ours] = value
            elif name != DECODER:
                raise UserError(f"{source}: {name} is no name of an LXMERT model.")
        words = encoder.get(WORD_EMBEDDINGS)
        if DECODER in plain and (words is None or not torch.equal(plain[DECODER], words)):
            raise UserError(f"{source}: {DECODER} differs from the word table; the file is damaged.")
        transferable = ("",) if task_name == PRETRAINING else ()
        also = ANSWERING if task_name in ANSWERING else ()
        return ModelWeights({}, encoder, head, task_name, transferable, compatible_tasks=also)

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Both directions of separate cross attention start from the shared one; parts that are off are left out."""
        moved = []
        if encoder.config.cross_attention == "separate":
            tensors |= {name.replace(CROSS, OTHER_CROSS): value for name, value in tensors.items() if CROSS in name}
            moved.append("visual_attention -> text_attention")
        return _without_absent(tensors, encoder), moved

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write a file of the official code: its pre-training names for pre-training, else `BEST.pth`'s.

        Raises:
            ValueError: the official code has no such model, or the file's name does not end with `.pth`.
        """
        path = Path(path)
        if path.suffix != self.suffix:
            raise UserError(f"{path}: official LXMERT files are named *{self.suffix}.")
        if not isinstance(model.encoder, LxmertEncoder):
            raise UserError(f"{path}: the encoder is a {type(model.encoder).__name__}, not LXMERT.")
        for name, value in OFFICIAL.items():
            if getattr(model.encoder.config, name) != value:
                raise UserError(
                    f"{path}: the official code has no encoder with {name} = {getattr(model.encoder.config, name)}."
                )
        encoder, task = dict(model.encoder.state_dict()), dict(model.task.state_dict())
        official = official_lxmert_state(ModelWeights({}, encoder, task, task_name))
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part, part.open("wb") as file:
            torch.save({name: value.detach().cpu() for name, value in official.items()}, file)
        return [f"detector.{name}" for name in model.detector.state_dict()]


def official_lxmert_state(parts: ModelWeights) -> dict[str, Tensor]:
    """The reverse of `OfficialLxmert.convert`: official names, without `module.`.

    Raises:
        ValueError: no official model has such a task, or such a head.
    """
    heads = {PRETRAINING: PRETRAINING_HEADS, **dict.fromkeys((*ANSWERING, PAIRS), FINE_TUNED_HEAD)}
    if parts.task_name not in heads:
        raise UserError(f"There is no official LXMERT model for the task '{parts.task_name}', only for {list(heads)}.")
    prefix = "" if parts.task_name == PRETRAINING else FINE_TUNED
    official = {f"{prefix}bert.{name}": value for name, value in parts.encoder.items()}
    back = {ours: theirs for theirs, ours in heads[parts.task_name].items()}
    for name, value in parts.task.items():
        theirs = replace_module(name, back)
        if theirs is None:
            raise UserError(f"task.{name} has no place in an official LXMERT model for {parts.task_name}.")
        official[theirs] = value
    if "word_head.bias" in parts.task:
        official[DECODER] = parts.encoder[WORD_EMBEDDINGS]
    return official


def _plain(name: str) -> str:
    """Without what several GPUs and fine-tuning put in front."""
    return name.removeprefix("module.").removeprefix(FINE_TUNED).removeprefix("module.")


def _head_of(plain: Mapping[str, Tensor]) -> tuple[str | None, Mapping[str, str]]:
    """Our task with such a head, and its names; a head over answers counts as the first task that has one."""
    if any(name.startswith(("cls.", "obj_predict_head.")) for name in plain):
        return PRETRAINING, PRETRAINING_HEADS
    if (hidden := plain.get("logit_fc.0.weight")) is not None:
        return (PAIRS if hidden.shape[0] == hidden.shape[1] else ANSWERING[0]), FINE_TUNED_HEAD
    has_answers = any(name.startswith("answer_head.") for name in plain)
    return (ANSWERING[0] if has_answers else None), QUESTION_ANSWERING_HEAD


def _without_absent(tensors: Mapping[str, Tensor], encoder: nn.Module) -> dict[str, Tensor]:
    """Without the segment table and the pooler where the encoder's config leaves them out."""
    off = () if encoder.config.with_segments else (SEGMENTS,)
    off += () if encoder.config.pooled == "tanh" else ("pooler.",)
    return {name: value for name, value in tensors.items() if not name.startswith(off)}


class BertBelow(BertStart):
    """BERT's layers as LXMERT's layers over words: the first by their numbers (official code) or the last (paper).

    The layers over regions, the cross attention and the region embeddings stay random.
    """

    brings = ("embeddings.", "encoder.layer.")
    names: ClassVar[Mapping[str, str]] = {name: name for name in BERT_IN_SEQUENCE}  # the encoder has BERT's own names

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        """Not our own encoder, whose names begin as BERT's do."""
        return super().recognise(tensors) and not any(name.startswith("encoder.visn_fc.") for name in tensors)

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """BERT's other layers are left out, see `bert_layers` of the encoder's config.

        Raises:
            ValueError: see `BertStart.check_tables`.
        """
        self.check_tables(tensors, encoder, source)
        number, wanted = re.compile(r"encoder\.layer\.(\d+)\."), encoder.config.l_layers
        numbers = {name: int(found[1]) for name in tensors if (found := number.match(name))}
        count = max(numbers.values(), default=-1) + 1
        first = max(count - wanted, 0) if encoder.config.bert_layers == "last" else 0
        kept = {name: value for name, value in tensors.items() if name not in numbers}
        for name, layer in numbers.items():
            if first <= layer < first + wanted:
                kept[number.sub(f"encoder.layer.{layer - first}.", name)] = tensors[name]
        which = encoder.config.bert_layers
        moved = [f"the {which} {wanted} of BERT's {count} layers -> encoder.layer"] if count > wanted else []
        return _without_absent(kept, encoder), moved


# Folders of transformers' LXMERT <-> names of our encoder and heads.


TRUNK = "lxmert."
ACTIVATION, NORM_EPS = "gelu", 1e-12  # of transformers' heads and of all its LayerNorms
LOSS_NORMALISER = 1 / 0.15  # the official code's; transformers' default is 6.67
# Fields of the encoder's config that transformers' model does not have, with the value that it computes, and why.
LIMITS: dict[str, tuple[Any, str]] = {
    "max_images": (1, "reads one image per text"),
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
        with atomic_files(path.parent, "config.json") as part:
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

"""Base classes of the weight adapters, which convert checkpoints of other projects to our parameter names and back.

`ADAPTERS` in `e2e_vl/run/build.py` lists the adapters of each encoder. Tables of names are {theirs: ours}; a name is
that of a parameter or, in most cases, of a module.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from typing_extensions import override

from detector.errors import UserError
from detector.io import atomic_files
from e2e_vl.model import VisionLanguageModel

PRETRAINING = "pretraining"  # name of the task
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"  # of all encoders and of BERT
TIED_DECODER = "predictions.decoder.weight"  # end of the name of tied word embeddings in other projects

Names = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """Weights with our parameter names, and what is known about their model."""

    # state dicts, empty if the file does not have the part
    detector: dict[str, Tensor]
    encoder: dict[str, Tensor]
    task: dict[str, Tensor]
    task_name: str | None = None  # task with such a head; None: no head, or an unknown one
    transferable: tuple[str, ...] = ()  # see `Task.transferable`
    move_background_last: bool | None = None  # order of the region classes; None: unknown
    compatible_tasks: tuple[str, ...] = ()  # other tasks with the same head

    @classmethod
    def of_model(cls, model: VisionLanguageModel, task_name: str) -> ModelWeights:
        """Return the weights of a model that is trained for a task."""
        return cls(
            dict(model.detector.state_dict()),
            dict(model.encoder.state_dict()),
            dict(model.task.state_dict()),
            task_name,
        )


class WeightAdapter(abc.ABC):
    """A checkpoint format from which an encoder can be initialised. The tuples contain prefixes of its parameters."""

    layout: ClassVar[str]  # name of the format in reports
    suffix: ClassVar[str | None] = None  # of exported files; None: no export
    required: Sequence[str] = ("",)  # must be in a checkpoint; other parameters may stay random
    # task of a whole model -> name of its config, to ask the model from pixels; empty: no whole model
    question_configs: ClassVar[Mapping[str, str]] = {}

    # the next four also apply to checkpoints of this project
    checked_fields: ClassVar[tuple[str, ...]] = ()  # config fields that must agree and that no weight shape shows
    optional: ClassVar[tuple[str, ...]] = ()  # only trained for some tasks; checkpoints of other tasks may lack them
    pretraining_only: ClassVar[tuple[str, ...]] = ()  # fine-tuned checkpoints may lack them
    segment_tables: ClassVar[tuple[str, ...]] = ()  # full names of tables with a row per text segment

    @abc.abstractmethod
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the names are those of this format."""

    @abc.abstractmethod
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """Convert a state dict to float32 weights with our names; `source` is for error messages."""

    def adapt(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Adapt converted weights to the encoder's config; return them and what was copied ("from -> to")."""
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a model in this format, if the adapter has a `suffix`.

        Returns:
            Names (`detector.`, `encoder.`, `task.`) that the format does not have and that were left out.
        """
        raise NotImplementedError


def replace_module(name: str, names: Names) -> str | None:
    """Rename a parameter or its module; None if neither is in `names`."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def invert(names: Names) -> dict[str, str]:
    """Return {ours: theirs} for {theirs: ours}; of two that are equal the last one counts."""
    return {new: old for old, new in names.items()}


def split_weights(
    tensors: Mapping[str, Tensor], encoder: Names, head: Names, source: str | Path, unused: Sequence[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a state dict into encoder and head, with our names and in float32; `unused` modules are ignored."""
    encoder_weights: dict[str, Tensor] = {}
    head_weights: dict[str, Tensor] = {}
    for name, value in tensors.items():
        float_value = value.float() if value.is_floating_point() else value
        encoder_name = replace_module(name, encoder)
        head_name = replace_module(name, head)
        if encoder_name is not None:
            encoder_weights[encoder_name] = float_value
        elif head_name is not None:
            head_weights[head_name] = float_value
        elif not name.endswith(TIED_DECODER) and replace_module(name, dict.fromkeys(unused, "")) is None:
            raise UserError(f"{source}: unexpected parameter {name} for this architecture and head.")
    words = encoder_weights.get(WORD_EMBEDDINGS)
    for name, value in tensors.items():
        if name.endswith(TIED_DECODER) and (words is None or not torch.equal(value.float(), words)):
            raise UserError(f"{source}: {name} differs from the word embeddings, to which it must be tied.")
    return encoder_weights, head_weights


def rename_head(task: Mapping[str, Tensor], names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Rename a head to another project's names; also returns the names of heads that only this project has."""
    ours_to_theirs = invert(names)
    modules = {ours.split(".")[0] for ours in ours_to_theirs}
    renamed = {}
    left_out = []
    for name, value in task.items():
        theirs = replace_module(name, ours_to_theirs)
        if theirs is not None:
            renamed[theirs] = value
        elif name.split(".")[0] not in modules:
            left_out.append(f"task.{name}")
        else:
            raise UserError(f"task.{name} has no equivalent in the other project, whose head is different.")
    return renamed, left_out


def check_settings(settings: Mapping[str, Any], required: Mapping[str, Any], path: Path) -> None:
    """Raise a UserError if a setting differs from the other project's, which would then compute something else."""
    for key, value in required.items():
        if settings[key] != value:
            raise UserError(
                f"{path}: the format requires {key} = {value}, but this model was trained with {settings[key]}."
            )


def check_task(task_name: str | None, choices: Sequence[str], model: str) -> None:
    """Raise a UserError if the other project has no model for a task; `model` is its name."""
    if task_name not in choices:
        raise UserError(f"There is no official {model} for the task '{task_name}', only for {', '.join(choices)}.")


def save_as_transformers(state: Mapping[str, Tensor], config: PreTrainedConfig, path: Path) -> None:
    """Write the weights and, in the same folder, transformers' `config.json`."""
    with atomic_files(path.parent, "config.json") as part:
        plain = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(plain, part / path.name, metadata={"format": "pt"})
        config.save_pretrained(part)


def shared_fields(config: PreTrainedConfig, other: type[PreTrainedConfig], *omitted: str) -> dict[str, Any]:
    """Return the values of the fields that both config classes have."""
    values = config.to_dict()
    names = {field.name for field in dataclasses.fields(other)} & values.keys()
    return {name: values[name] for name in names - {"architectures", "model_type", *omitted}}


# BERT checkpoints of transformers, with old and new names

BERT_MODULES = (
    "embeddings.word_embeddings",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
    "embeddings.LayerNorm",
    "encoder.layer",
    "pooler",
)
WORD_HEAD = {
    "cls.predictions.transform.dense": "word_head.transform.dense",
    "cls.predictions.transform.LayerNorm": "word_head.transform.norm",
    "cls.predictions.decoder.bias": "word_head.bias",  # a copy of the next one in files of some versions
    "cls.predictions.bias": "word_head.bias",  # last, because `invert` keeps the last one
}
POSITION_IDS = "embeddings.position_ids"  # saved by old versions


class BertStart(WeightAdapter):
    """Initialises an encoder from BERT; parameters that BERT does not have stay random."""

    layout = "BERT"
    names: ClassVar[Names] = dict(zip(BERT_MODULES, BERT_MODULES, strict=True))  # for encoders with BERT's names
    head_names: ClassVar[Names] = WORD_HEAD
    unused: ClassVar[tuple[str, ...]] = ("cls.seq_relationship", POSITION_IDS)
    transferable: ClassVar[tuple[str, ...]] = ("word_head.",)  # see `Task.transferable`

    @override
    @property
    def required(self) -> list[str]:
        """All modules except the pooler, which masked language models do not have."""
        return [f"{ours}." for ours in self.names.values() if ours != "pooler"]

    @override
    def recognises(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.removeprefix("bert.") == "embeddings.token_type_embeddings.weight" for name in tensors)

    @override
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        renamed = {}
        for name, value in tensors.items():
            name = re.sub(r"\.beta$", ".bias", name)  # of old versions
            name = re.sub(r"\.gamma$", ".weight", name)
            renamed[name.removeprefix("bert.")] = value
        encoder, head = split_weights(renamed, self.names, self.head_names, source, self.unused)
        return ModelWeights({}, encoder, head, transferable=self.transferable)

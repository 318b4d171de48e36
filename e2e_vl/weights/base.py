"""Base classes of the weight adapters, which convert checkpoints of other projects to our parameter names and back.

`ADAPTERS` in `e2e_vl/run/build.py` lists the adapters of each encoder; `e2e_vl.weights.start` uses them. Tables of
names are {theirs: ours}; a name is a parameter or, most often, the module that holds it.
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

from detector.errors import UserError
from detector.io import atomic_file, atomic_files
from e2e_vl.model import VisionLanguageModel

PRETRAINING = "pretraining"  # our name of the task
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"  # in all our encoders, and in BERT
TIED_DECODER = "predictions.decoder.weight"  # how names end in other projects that hold the word embeddings again

Names = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """Weights under our names, and the model that they come from."""

    # of the three parts; empty if the file lacks a part
    detector: dict[str, Tensor]
    encoder: dict[str, Tensor]
    task: dict[str, Tensor]
    task_name: str | None = None  # of our task that has such a head; None: there is none, or the file has no head
    transferable: tuple[str, ...] = ()  # see `Task.transferable`
    background_last: bool | None = None  # place of the background among region classes of the head; None: unknown
    compatible_tasks: tuple[str, ...] = ()  # further tasks of ours that have the same head


class WeightAdapter(abc.ABC):
    """One format of checkpoints that an encoder can start from. The tuples contain prefixes of its parameter names."""

    layout: ClassVar[str]  # whose names the files have, for reports
    suffix: ClassVar[str | None] = None  # of the files that `export` writes; None: it writes none
    required: Sequence[str] = ("",)  # parameters that a checkpoint must have; the rest of the encoder stays random

    # True of the encoder whoever trained it, runs of this project included:
    same_config: ClassVar[tuple[str, ...]] = ()  # fields of its config, not prefixes, that no shape of a weight shows
    optional: ClassVar[tuple[str, ...]] = ()  # only some tasks train them: the weights of another task may lack them
    pretraining_only: ClassVar[tuple[str, ...]] = ()  # fine-tuned weights may lack them
    segment_tables: ClassVar[tuple[str, ...]] = ()  # whole names: a row per text segment

    @abc.abstractmethod
    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a file with these names is of this format."""

    @abc.abstractmethod
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """A state dict under our names in float32; `source` is for error messages."""

    def fit(self, tensors: dict[str, Tensor], encoder: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Converted weights as this encoder can take them, by default as they are, and what was moved, "from -> to"."""
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: Path) -> list[str]:
        """Write a model in this format, for an adapter with a `suffix`.

        Returns:
            names (`detector.`, `encoder.`, `task.`) of what the format has no place for and was left out.
        """
        raise NotImplementedError


def replace_module(name: str, names: Names) -> str | None:
    """The name of a parameter after its module, or the parameter itself, was renamed; None: it is not in `names`."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def reverse(names: Names) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def split_names(
    tensors: Mapping[str, Tensor], encoder: Names, head: Names, source: str | Path, unused: Sequence[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The encoder and the head in a file, under our names and in float32.

    Args:
        unused: their parameters or modules that are left out.
    """
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, value in tensors.items():
        for part, names in zip(found, (encoder, head), strict=True):
            if (ours := replace_module(name, names)) is not None:
                part[ours] = value.float() if value.is_floating_point() else value
                break
        else:
            if not name.endswith(TIED_DECODER) and replace_module(name, dict.fromkeys(unused, "")) is None:
                raise UserError(f"{source}: {name} is no parameter of a model with this architecture and head.")
    words = found[0].get(WORD_EMBEDDINGS)
    for name, value in tensors.items():
        if name.endswith(TIED_DECODER) and (words is None or not torch.equal(value.float(), words)):
            raise UserError(f"{source}: {name} differs from the word embeddings, which are tied to it in BERT.")
    return found


def rename_head(task: Mapping[str, Tensor], names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """The head under the names of another project, and what was left out: side heads and objectives of ours alone."""
    ours_to_theirs = reverse(names)
    modules = {ours.split(".")[0] for ours in ours_to_theirs}
    renamed, left_out = {}, []
    for name, value in task.items():
        if (theirs := replace_module(name, ours_to_theirs)) is not None:
            renamed[theirs] = value
        elif name.split(".")[0] not in modules:
            left_out.append(f"task.{name}")
        else:
            raise UserError(f"task.{name} has no place in the other project, whose head would compute something else.")
    return renamed, left_out


def check_settings(own: Mapping[str, Any], needed: Mapping[str, Any], path: Path) -> None:
    """Raise a UserError if the other project would compute something else with the same weights.

    Args:
        own: settings of our encoder or detector.
        needed: some of them, with the values that the other project has.
    """
    for key, value in needed.items():
        if own[key] != value:
            raise UserError(
                f"{path}: the other project has {key} = {value}, and this model was trained with {own[key]}."
            )


def require_task(task_name: str | None, choices: Sequence[str], model: str) -> None:
    if task_name not in choices:
        raise UserError(
            f"There is no official {model} model for the task '{task_name}', only for {', '.join(choices)}."
        )


def save_for_torch(content: dict[str, Any], path: Path) -> None:
    """Write a file of an official code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("wb") as file:
        torch.save(content, file)


def save_for_transformers(state: Mapping[str, Tensor], config: PreTrainedConfig, path: Path) -> None:
    """Write the weights, and beside them the `config.json` with which transformers reads the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files(path.parent, "config.json") as part:
        save_file(on_cpu(state), part / path.name, metadata={"format": "pt"})
        config.save_pretrained(part)


def on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}


def shared_fields(config: PreTrainedConfig, other: type[PreTrainedConfig], *omitted: str) -> dict[str, Any]:
    """The fields that both kinds of config have."""
    own = config.to_dict()
    names = {field.name for field in dataclasses.fields(other)} & own.keys()
    return {name: own[name] for name in names - {"architectures", "model_type", *omitted}}


def state_dicts(model: VisionLanguageModel, task_name: str) -> ModelWeights:
    """The weights of a model of ours."""
    detector, encoder, task = (dict(part.state_dict()) for part in (model.detector, model.encoder, model.task))
    return ModelWeights(detector, encoder, task, task_name)


# BERT checkpoints of transformers as a start: old and new names, and heads.


MODULES = (
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
    "cls.predictions.decoder.bias": "word_head.bias",  # the next one again, in files of some versions
    "cls.predictions.bias": "word_head.bias",  # after it: `reverse` takes the last
}
POSITION_IDS = "embeddings.position_ids"  # indices that old versions saved


class BertStart(WeightAdapter):
    """BERT fills the parts of an encoder that it has; the rest stays random."""

    layout = "BERT"
    names: ClassVar[Names] = dict(zip(MODULES, MODULES, strict=True))  # of an encoder that has BERT's names
    head_names: ClassVar[Names] = WORD_HEAD
    unused: ClassVar[tuple[str, ...]] = ("cls.seq_relationship", POSITION_IDS)
    transferable: ClassVar[tuple[str, ...]] = ("word_head.",)  # see `Task.transferable`

    @property
    def required(self) -> list[str]:
        """All that it has but the pooler, which a masked language model lacks."""
        return [f"{ours}." for ours in self.names.values() if ours != "pooler"]

    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(name.removeprefix("bert.") == "embeddings.token_type_embeddings.weight" for name in tensors)

    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        new = {
            re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)).removeprefix("bert."): value
            for name, value in tensors.items()
        }
        encoder, head = split_names(new, self.names, self.head_names, source, self.unused)
        return ModelWeights({}, encoder, head, transferable=self.transferable)

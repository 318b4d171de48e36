"""What every weight adapter offers: files of other projects under our names, for the encoder that it serves.

The adapters of each encoder are listed in `ADAPTERS` of `e2e_vl/run/build.py`; `e2e_vl.weights.start` asks them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from detector.errors import UserError
from detector.io import atomic_file, atomic_files
from e2e_vl.model import VisionLanguageModel

PRETRAINING = "pretraining"  # our name of the task
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"  # in all our encoders, and in BERT


@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """Weights under our names, and what is known about the model that they come from."""

    # of the three parts; empty where the file has nothing of a part
    detector: dict[str, Tensor]
    encoder: dict[str, Tensor]
    task: dict[str, Tensor]
    task_name: str | None = None  # of our task that has such a head; None: there is none, or the file has no head
    transferable: tuple[str, ...] = ()  # see `Task.transferable`
    background_last: bool | None = None  # place of the background among region classes of the head; None: unknown
    compatible_tasks: tuple[str, ...] = ()  # further tasks of ours that have the same head


class WeightAdapter(abc.ABC):
    """One format of files that an encoder starts from. The tuples hold prefixes of its parameter names."""

    layout: ClassVar[str]  # whose names the files have, for reports
    suffix: ClassVar[str | None] = None  # of the files that `export` writes; None: it writes none
    required: ClassVar[tuple[str, ...]] = ("",)  # what a file must hold; the rest of the encoder stays random

    # What holds for the encoder whoever trained it, runs of this project too:
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

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Converted weights as this encoder can take them, by default as they are, and what was moved, "from -> to".

        Another architecture is a UserError that says which setting to change.
        """
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write a model in this format, for an adapter with a `suffix`.

        Returns:
            names (`detector.`, `encoder.`, `task.`) of what the format has no place for and was left out.
        """
        raise NotImplementedError(f"{type(self).__name__} writes no files.")


def replace_module(name: str, names: Mapping[str, str]) -> str | None:
    """The name of a parameter after its module, or the parameter itself, was renamed; None: it is not in `names`."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def reverse(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def as_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating-point tensors in float32, the others as they are."""
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def check_tied(decoder: Tensor | None, encoder: Mapping[str, Tensor], source: str | Path) -> None:
    """A file may hold the word embeddings again, as decoder of the head over words; they must be the same."""
    words = encoder.get(WORD_EMBEDDINGS)
    if decoder is not None and (words is None or not torch.equal(decoder, words)):
        raise UserError(f"{source}: the decoder of words differs from the word embeddings, which are tied in BERT.")


def unknown_name(name: str, model: str, source: str | Path) -> UserError:
    return UserError(f"{source}: {name} is no name of a {model} model.")


def check_encoder(model: VisionLanguageModel, needed: Mapping[str, Any], path: Path) -> None:
    """Refuse an encoder that the other project would compute otherwise with the same weights.

    Args:
        needed: fields of the encoder's config, with the values that the other project has.
    """
    for name, value in needed.items():
        if (own := getattr(model.encoder.config, name)) != value:
            raise UserError(f"{path}: such files have no encoder with {name} = {own}, only with {name} = {value}.")


def check_detector(settings: Mapping[str, Any], needed: Mapping[str, Any], path: Path, remedy: str) -> None:
    """Refuse settings of a detector with which the other project would compute other features from the same weights."""
    for key, value in needed.items():
        if settings[key] != value:
            raise UserError(
                f"{path}: the official code has {key} {value}, this model {settings[key]}, so it would compute other "
                f"features from the same weights; train with {remedy}."
            )


def save_for_torch(content: dict[str, Any], path: str | Path, suffix: str) -> None:
    """Write a file of an official code."""
    path = Path(path)
    if path.suffix != suffix:
        raise UserError(f"{path}: official files of this model are named *{suffix}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part, part.open("wb") as file:
        torch.save(content, file)


def save_for_transformers(state: Mapping[str, Tensor], config: PreTrainedConfig, path: str | Path) -> None:
    """Write `model.safetensors`, and beside it the `config.json` with which transformers reads the folder."""
    path = Path(path)
    if path.name != SAFE_WEIGHTS_NAME:
        raise UserError(
            f"{path}: transformers reads folders with a file {SAFE_WEIGHTS_NAME}; name the output "
            f"{path.with_suffix('') / SAFE_WEIGHTS_NAME}."
        )
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


def require_task(task_name: str | None, known: Sequence[str], model: str) -> None:
    if task_name not in known:
        raise UserError(f"There is no official {model} model for the task '{task_name}', only for {', '.join(known)}.")

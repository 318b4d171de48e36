"""What every weight adapter offers: files of other projects in our names, for the encoder that it serves.

The adapters of each encoder are listed in `ADAPTERS` of `e2e_vl/run/build.py`; `e2e_vl.weights.start` asks them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME

from detector.errors import UserError
from e2e_vl.model import VisionLanguageModel


@dataclasses.dataclass(frozen=True)
class ModelWeights:
    """Weights by our names, and what is known about the model that they come from."""

    # of the three parts; empty where the file has nothing of a part
    detector: dict[str, Tensor]
    encoder: dict[str, Tensor]
    task: dict[str, Tensor]
    task_name: str | None = None  # of our task that has such a head; None: there is none, or the file has no head
    transferable: tuple[str, ...] = ()  # see `Task.transferable`
    background_last: bool | None = None  # place of the background among region classes of the head; None: unknown
    compatible_tasks: tuple[
        str, ...
    ] = ()  # further tasks of ours that have the same head, where the file does not tell them


class WeightAdapter(abc.ABC):
    """One format of files that an encoder starts from. The tuples hold prefixes of its parameter names."""

    layout: ClassVar[str]  # whose names the files have, for reports
    suffix: ClassVar[str | None] = None  # of the files that `export` writes; None: it writes none
    brings: ClassVar[tuple[str, ...]] = ("",)  # what a file must hold; the rest of the encoder stays random

    # What holds for the encoder whoever trained it, runs of this project too:
    same_config: ClassVar[tuple[str, ...]] = ()  # fields of its config, not prefixes, that no shape of a weight shows
    optional: ClassVar[tuple[str, ...]] = ()  # only some tasks train them: the weights of another task may lack them
    pretraining_only: ClassVar[tuple[str, ...]] = ()  # only pre-training trains them: fine-tuned weights may lack them
    segment_tables: ClassVar[tuple[str, ...]] = ()  # whole names: a row per text segment

    @abc.abstractmethod
    def recognise(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a file with these names is of this format."""

    @abc.abstractmethod
    def convert(self, tensors: Mapping[str, Tensor], source: str | Path) -> ModelWeights:
        """What `detector.checkpoint.read_tensors` gave, by our names in float32; `source` is for error messages.

        Raises:
            ValueError: a name that the format does not have, or a damaged file.
        """

    def fit(
        self, tensors: dict[str, Tensor], encoder: nn.Module, source: str | Path
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Converted weights as this encoder can take them, by default as they are, and what was moved, "from -> to".

        Raises:
            ValueError: another architecture; the message says which setting to change.
        """
        return tensors, []

    def export(self, model: VisionLanguageModel, task_name: str, path: str | Path) -> list[str]:
        """Write a model in this format, for an adapter with a `suffix`.

        Returns:
            names (`detector.`, `encoder.`, `task.`) of what the format has no place for and was left out.

        Raises:
            ValueError: the other project has no such model.
        """
        raise NotImplementedError(f"{type(self).__name__} writes no files.")


def replace_module(name: str, names: Mapping[str, str]) -> str | None:
    """The name of a parameter after its module, or the parameter itself, was renamed; None: it is not in `names`."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def require_transformers_name(path: Path) -> None:
    """Raises UserError unless transformers finds the weights of a folder in a file of this name."""
    if path.name != SAFE_WEIGHTS_NAME:
        raise UserError(
            f"{path}: transformers reads folders with a file {SAFE_WEIGHTS_NAME}; name the output "
            f"{path.with_suffix('') / SAFE_WEIGHTS_NAME}."
        )

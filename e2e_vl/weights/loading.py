"""Initial weights of the encoder and the heads, from our runs and from checkpoints of other projects.

The kind of checkpoint is detected from its contents:

- a run directory, the `model` folder in it, or its `encoder` or `task` folder; an encoder's `save_pretrained` folder;
- a file, a folder or a hub name that one of the encoder's weight adapters recognises, see `e2e_vl.weights.base`.

`Task.starts_from` defines how a head is initialised from the head of another task. The phrase head is initialised
from the phrase head of another run. Everything else must match; the report lists missing and unused parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from detector.checkpoint import LoadReport, load_weights, read_tensors
from detector.errors import MissingFileError, UserError, first_line, user_path
from detector.io import read_json, read_yaml
from detector.weight_names import strip_wrappers
from e2e_vl.data.answer_lists import ANSWERS_FILE, read_answers
from e2e_vl.parts import TASKS, decode
from e2e_vl.tasks.base import HeadInit, Task
from e2e_vl.tasks.phrase_head import PhraseHead
from e2e_vl.text import load_tokenizer, looks_like_hub_name, simplify_answer
from e2e_vl.weights.base import WeightAdapter

FILES = ("model.safetensors", "pytorch_model.bin")
PUBLISHED_ANSWERS = "all_ans.json"  # published with LXMERT's pre-training


@dataclasses.dataclass(frozen=True)
class InitRules:
    """What the initialisation of an encoder and a task depends on, besides the weights."""

    task_name: str  # the run's task
    adapters: Sequence[WeightAdapter] = ()  # of the run's encoder

    def collect(self, attribute: str) -> tuple[str, ...]:
        return tuple(value for adapter in self.adapters for value in getattr(adapter, attribute))


@dataclasses.dataclass(frozen=True)
class CheckpointPart:
    """Weights with our parameter names, and their origin."""

    path: Path
    tensors: dict[str, Tensor]  # of the encoder or of the task
    adapter: WeightAdapter | None  # None: a checkpoint of this project
    task_name: str | None  # task of the training; None: unknown, or none of our tasks
    transferable: tuple[str, ...]  # see `Task.transferable`
    move_background_last: bool | None  # order of the region classes; None: unknown

    @property
    def layout(self) -> str:
        return "this project" if self.adapter is None else self.adapter.layout


def read_checkpoint_part(path: str | Path, part: Literal["encoder", "task"], rules: InitRules) -> CheckpointPart:
    """Read the encoder's or the task's weights from any kind of checkpoint."""
    file = find_weights(str(path), part)
    tensors = read_tensors(file)
    settings = _settings_of_run(file.parent, part)
    if not settings:  # of another project, perhaps wrapped
        tensors = strip_wrappers(tensors)
    for adapter in rules.adapters:
        if adapter.recognises(tensors):
            found = adapter.convert(tensors, file)
            task_name = rules.task_name if rules.task_name in found.compatible_tasks else found.task_name
            return CheckpointPart(
                file, getattr(found, part), adapter, task_name, found.transferable, found.move_background_last
            )
    task_settings = settings.get("task") or {}
    name = task_settings.get("name")
    task_part, move_background_last = TASKS.get(name or rules.task_name), None
    if part == "task" and task_settings and hasattr(getattr(task_part, "config_class", None), "has_background_last"):
        config = decode(task_settings.get("config", {}), task_part.config_class, "task.config")
        move_background_last = config.has_background_last
    transferable = Task.transferable if task_part is None else task_part.cls.transferable
    return CheckpointPart(file, tensors, None, name, transferable, move_background_last)


def load_encoder(encoder: nn.Module, path: str | Path, rules: InitRules) -> LoadReport:
    """Initialise an encoder; see the top of this file for `path`.

    As in the official VL-BERT code, tasks with `copies_first_segment` replace the second text segment of pre-trained
    weights by the first, and parameters that only some tasks train may be missing or unused. If the weights have no
    relative geometry, it is initialised to zero.
    """
    source = read_checkpoint_part(path, "encoder", rules)
    _check_config(source.path, encoder, rules.collect("checked_fields"))
    tensors, allow_missing, copied = source.tensors, [], []
    if source.adapter is not None:
        tensors, copied = source.adapter.adapt(tensors, encoder)
        allow_missing = [name for name in encoder.state_dict() if not name.startswith(tuple(source.adapter.required))]
    optional, pretraining_only = rules.collect("optional"), rules.collect("pretraining_only")
    if source.task_name not in (None, rules.task_name):
        allow_missing += optional if source.transferable else (*optional, *pretraining_only)
        if source.transferable and TASKS[rules.task_name].cls.copies_first_segment:
            for name in tensors.keys() & rules.collect("segment_tables"):
                tensors = {**tensors, name: tensors[name][[0, 0, *range(2, len(tensors[name]))]]}
                copied.append(f"{name} row 0 -> row 1")
    allow_unexpected = () if source.adapter is None and source.task_name is None else (*optional, *pretraining_only)
    zero = [name for name, module in encoder.named_modules() if getattr(module, "starts_at_zero", False)]
    zero = [part for part in zero if not any(name.startswith(f"{part}.") for name in tensors)]
    allow_missing = [*allow_missing, *(f"{part}." for part in zero)]
    report = load_weights(
        encoder,
        tensors,
        source.path,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        layout=source.layout,
    )
    return dataclasses.replace(report, copied=copied, zero=zero)


def load_task(task: Task, path: str | Path, rules: InitRules, *, knows_class_order: bool = True) -> LoadReport:
    """Initialise a head from that of the same task, or of another task according to `Task.starts_from`.

    Region classes are reordered if the background is the first class of one head and the last of the other. The
    weights may contain parts that the task does not use. Without `knows_class_order` (the answers were listed from
    annotations), checkpoints of other projects, which do not contain their answers, cannot be loaded.
    """
    source = read_checkpoint_part(path, "task", rules)
    if source.task_name == rules.task_name or (source.adapter is None and source.task_name is None):
        check_answers(source.path.parent, task)
        if source.adapter is not None and not knows_class_order:
            raise UserError(
                f"{source.path}: the file does not contain the answers of its head, and those of this run were built "
                "from annotations in another order; set task.config.answers to the list used in its training."
            )
        return _continue_head(task, source)
    rule = (task.starts_from or HeadInit()).for_weights(source.tensors)
    if not any(prefix.startswith(source.transferable) for prefix in rule.takes):
        theirs = f"a {source.layout}" if source.task_name is None else f"the head of {source.task_name}"
        raise UserError(
            f"{source.path}: contains {theirs}, which cannot start the head of {rules.task_name}; remove task.weights."
        )
    return _start_from_other(task, source, rule)


def load_phrase_head(head: PhraseHead, path: str | Path) -> LoadReport:
    """Initialise the phrase head from that of another run of any task; all parameters must match."""
    file = find_weights(str(path), "phrases")
    settings = _settings_of_run(file.parent, "phrases").get("phrases") or {}
    if settings.get("layer", head.layer) != head.layer:
        raise UserError(
            f"{file}: the head reads the states after {settings['layer']} layers, and phrases.layer is {head.layer}; "
            f"set phrases.layer={settings['layer']}."
        )
    return load_weights(head, read_tensors(file), file, layout="this project")


def _continue_head(task: Task, source: CheckpointPart) -> LoadReport:
    rule = task.starts_from or HeadInit()
    tensors, copied = source.tensors, []
    moved = {name: value for name, value in tensors.items() if name.startswith(rule.region_classes)}
    if moved and source.move_background_last not in (None, task.config.has_background_last):
        step, place = (1, "first") if source.move_background_last else (-1, "last")
        tensors = tensors | {name: value.roll(step, dims=0) for name, value in moved.items()}
        copied = [f"{prefix[:-1]}, background becomes the {place} class" for prefix in rule.region_classes]
    own = _modules(task.state_dict())
    off = [name for name in tensors if name.startswith(rule.parts) and name.split(".")[0] not in own]
    # an objective that the other run lacked
    new = [f"{name}." for name in own - _modules(tensors)] if task.sums_objectives else []
    report = load_weights(task, tensors, source.path, allow_missing=new, allow_unexpected=off, layout=source.layout)
    return dataclasses.replace(report, copied=copied)


def _start_from_other(task: Task, source: CheckpointPart, rule: HeadInit) -> LoadReport:
    """Initialise a head from a head of another task.

    Everything that the rule copies must exist, except parts that the task does not use or that are not transferable.
    """
    own = task.state_dict()
    modules = _modules(own)
    copies = {
        start: to
        for start, to in rule.copies.items()
        if to.split(".")[0] in modules and start.startswith(source.transferable)
    }
    tensors: dict[str, Tensor] = {}
    copied = []

    def moved(start: str, to: str) -> dict[str, Tensor]:
        """The parameters with the prefix `start`, which is replaced by `to`."""
        return {
            to + name.removeprefix(start): value for name, value in source.tensors.items() if name.startswith(start)
        }

    for start, to in copies.items():
        if found := moved(start, to):
            tensors |= found
            copied.append(f"{start.removesuffix('.')} -> {to.removesuffix('.')}")
    if rule.difference is not None and (found := moved(*rule.difference)):
        start, to = rule.difference
        tensors |= {name: value[1:2] - value[0:1] for name, value in found.items()}
        copied.append(f"{start[:-1]} row 1 minus row 0 -> {to[:-1]}")
    if rule.answer_rows is not None and (found := moved(*rule.answer_rows)):
        start, to = rule.answer_rows
        theirs = _answers_beside(source.path)
        ours = task.answer_vocabulary.answers
        tensors |= {name: select_answer_rows(value, theirs, ours, name) for name, value in found.items()}
        count = sum(simplify_answer(answer) in theirs for answer in ours)
        copied.append(f"{start[:-1]} rows of {count} of {len(ours)} answers -> {to[:-1]}")
    random = [name for name in own if name.startswith(rule.random) and not name.startswith(tuple(copies.values()))]
    report = load_weights(task, tensors, source.path, allow_missing=random, layout=source.layout)
    read = (*copies, *(rule.difference or ())[:1], *(rule.answer_rows or ())[:1])
    left = [name for name in source.tensors if not name.startswith(read)]
    return dataclasses.replace(report, unexpected=[*report.unexpected, *left], copied=copied)


def _modules(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def _answers_beside(path: Path) -> list[str]:
    """The answers of a head in the order of its classes, from a list in the same folder."""
    for name in (ANSWERS_FILE, PUBLISHED_ANSWERS):
        if (path.parent / name).is_file():
            return read_answers(path.parent / name)
    raise MissingFileError(
        f"{path.parent}: there is no list of the answers of {path.name}; add {PUBLISHED_ANSWERS} from its "
        f"publishers, or {ANSWERS_FILE}."
    )


def select_answer_rows(rows: Tensor, theirs: Sequence[str], ours: Sequence[str], name: str) -> Tensor:
    """Select the rows of our answers from a weight or bias for another list of answers; unknown answers get zeros.

    Our answers are normalised by `simplify_answer` first (official LXMERT code).
    """
    if len(rows) != len(theirs):
        raise UserError(f"{name}: the head has {len(rows)} answers, but its list of answers has {len(theirs)}.")
    class_of = {answer: number for number, answer in enumerate(theirs)}
    found = torch.tensor([class_of.get(simplify_answer(answer), -1) for answer in ours])
    return rows[found.clamp(min=0)] * (found >= 0).view(-1, *[1] * (rows.ndim - 1))


def _check_config(file: Path, encoder: nn.Module, fields: Sequence[str]) -> None:
    """Compare settings that no weight shape shows with the `config.json` of a weights file, if there is one."""
    path = file.parent / "config.json"
    if not path.is_file():
        return
    theirs, own = read_json(path, dict[str, Any]), encoder.config.to_dict()
    for name in fields:
        if name in theirs and name in own and theirs[name] != own[name]:
            raise UserError(
                f"{path}: {name} is {theirs[name]} there and {own[name]} here; set encoder.config.{name} to it."
            )


def check_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UserError if the encoder was trained with another vocabulary, even one of the same size."""
    path = user_path(path)
    places = [path / "model", path]  # a run, a model folder
    places += [part.parent for part in (path, path.parent) if part.name == "encoder"]  # the encoder's folder or file
    folder = next((place / "tokenizer" for place in places if (place / "tokenizer").is_dir()), None)
    if folder is None:
        return
    theirs, own = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    if theirs != own:
        raise UserError(
            f"{path}: the encoder was trained with the {len(theirs)} wordpieces in {folder}, but this run has another "
            f"vocabulary of {len(own)}; set data.vocabulary={folder}."
        )


def check_answers(folder: Path, task: Task) -> None:
    """Raise a UserError if the head in `folder` has other answers, or the same answers in another order."""
    path = folder / ANSWERS_FILE
    if task.vocabulary_class is None or not path.is_file():
        return
    if read_answers(path) != task.answer_vocabulary.answers:
        raise UserError(
            f"{path}: the head was trained with other answers than those of this run, or in another order; set "
            f"task.config.answers={path}."
        )


def find_weights(name: str, part: str) -> Path:
    """Find the weights file of a part: `encoder`, `task` or `phrases`; see the top of this file for `name`."""
    path = user_path(name)
    if path.is_file():
        return path
    if not path.exists() and looks_like_hub_name(name):
        try:
            cached_file(name, "config.json")  # raises every possible error first; also used by `load_encoder`
            new, old = FILES
            found = cached_file(name, new, _raise_exceptions_for_missing_entries=False) or cached_file(name, old)
        except (OSError, ValueError) as error:
            raise MissingFileError(
                f"{name}: neither a local path nor a model that could be downloaded from the hub "
                f"({first_line(error)}); check the name and the connection, or use a local file."
            ) from error
        return Path(found)
    for folder in (path / "model" / part, path / part, path):
        for file in FILES:
            if (folder / file).is_file():
                return folder / file
    raise MissingFileError(
        f"{path}: no weights for `{part}` found; use a run directory, a file, or a folder with {' or '.join(FILES)}."
    )


def _settings_of_run(folder: Path, part: str) -> dict[str, Any]:
    """The saved settings of the run that contains a part's folder; empty if there is none."""
    path = folder.absolute().parent / "config.yaml"
    return read_yaml(path) if folder.absolute().name == part and path.is_file() else {}

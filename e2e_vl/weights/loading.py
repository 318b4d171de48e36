"""Initial weights of the encoder and the heads, from our runs and from checkpoints of other projects.

The kind of checkpoint is detected from its contents:

- a run directory, the `model` folder in it, or its `encoder` or `task` folder; an encoder's `save_pretrained` folder;
- a file, a folder or a hub name that one of the encoder's weight adapters recognises, see `e2e_vl.weights.base`.

`Task.init_from` defines how a head is initialised from the head of another task. The phrase head is initialised
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
from e2e_vl.registry import TASKS, decode
from e2e_vl.tasks.base import HeadInit, Task
from e2e_vl.tasks.box_refinement import BoxRefinementHead
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
        """Return the values of an attribute of all adapters, such as `optional`."""
        values: list[str] = []
        for adapter in self.adapters:
            values += getattr(adapter, attribute)
        return tuple(values)


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
        """The name of the format in reports."""
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
            weights = adapter.convert(tensors, file)
            part_tensors = weights.encoder if part == "encoder" else weights.task
            task_name = weights.task_name
            if rules.task_name in weights.compatible_tasks:
                task_name = rules.task_name
            return CheckpointPart(
                file, part_tensors, adapter, task_name, weights.transferable, weights.move_background_last
            )

    # of this project
    task_settings = settings.get("task") or {}
    task_name = task_settings.get("name")
    task_entry = TASKS.get(task_name or rules.task_name)
    if task_entry is None:  # a task that is not registered here
        return CheckpointPart(file, tensors, None, task_name, Task.transferable, move_background_last=None)
    move_background_last = None
    if part == "task" and task_settings and hasattr(task_entry.config_class, "has_background_last"):
        config = decode(task_settings.get("config", {}), task_entry.config_class, "task.config")
        move_background_last = config.has_background_last
    return CheckpointPart(file, tensors, None, task_name, task_entry.cls.transferable, move_background_last)


def load_encoder(encoder: nn.Module, path: str | Path, rules: InitRules) -> LoadReport:
    """Initialise an encoder; see the top of this file for `path`.

    As in the official VL-BERT code, tasks with `copies_first_segment` replace the second text segment of pre-trained
    weights by the first, and parameters that only some tasks train may be missing or unused. If the weights have no
    relative geometry, it is initialised to zero.
    """
    source = read_checkpoint_part(path, "encoder", rules)
    _check_config(source.path, encoder, rules.collect("checked_fields"))
    tensors = source.tensors
    allow_missing = []
    copied = []
    if source.adapter is not None:
        tensors, copied = source.adapter.adapt(tensors, encoder)
        required = tuple(source.adapter.required)
        allow_missing = [name for name in encoder.state_dict() if not name.startswith(required)]
    optional = rules.collect("optional")
    pretraining_only = rules.collect("pretraining_only")
    if source.task_name not in (None, rules.task_name):
        allow_missing += optional
        if not source.transferable:
            allow_missing += pretraining_only
        if source.transferable and TASKS[rules.task_name].cls.copies_first_segment:
            for name in tensors.keys() & rules.collect("segment_tables"):
                rows = [0, 0, *range(2, len(tensors[name]))]
                tensors = {**tensors, name: tensors[name][rows]}
                copied.append(f"{name} row 0 -> row 1")
    is_encoder_alone = source.adapter is None and source.task_name is None  # nothing is known about its training
    allow_unexpected = () if is_encoder_alone else (*optional, *pretraining_only)
    zero = []  # modules that the weights lack and that begin at zero
    for module_name, module in encoder.named_modules():
        if getattr(module, "starts_at_zero", False):
            is_in_weights = any(name.startswith(f"{module_name}.") for name in tensors)
            if not is_in_weights:
                zero.append(module_name)
    allow_missing += [f"{name}." for name in zero]
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
    """Initialise a head from that of the same task, or of another task according to `Task.init_from`.

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
    rule = (task.init_from or HeadInit()).for_weights(source.tensors)
    if not any(prefix.startswith(source.transferable) for prefix in rule.source_prefixes):
        weights = f"a {source.layout}" if source.task_name is None else f"the head of {source.task_name}"
        raise UserError(
            f"{source.path}: contains {weights}, which cannot start the head of {rules.task_name}; remove task.weights."
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


def load_box_refinement(head: BoxRefinementHead, path: str | Path) -> LoadReport:
    """Initialise the box refinement from that of another run of any task; all parameters must match."""
    file = find_weights(str(path), "box_refinement")
    return load_weights(head, read_tensors(file), file, layout="this project")


def _continue_head(task: Task, source: CheckpointPart) -> LoadReport:
    """Initialise a head from that of the same task."""
    rule = task.init_from or HeadInit()
    tensors = source.tensors
    copied = []
    class_rows = {name: value for name, value in tensors.items() if name.startswith(rule.region_classes)}
    if class_rows and source.move_background_last not in (None, task.config.has_background_last):
        if source.move_background_last:
            step = 1
            position = "first"
        else:
            step = -1
            position = "last"
        tensors = tensors | {name: value.roll(step, dims=0) for name, value in class_rows.items()}
        copied = [f"{prefix[:-1]}, background becomes the {position} class" for prefix in rule.region_classes]
    modules = _modules(task.state_dict())
    target_names = [name for name in tensors if name.startswith(rule.target_prefixes)]
    unused = [name for name in target_names if name.split(".")[0] not in modules]
    new = []  # objectives that the other run lacked
    if rule.allows_new_modules:
        new = [f"{name}." for name in modules - _modules(tensors)]
    report = load_weights(task, tensors, source.path, allow_missing=new, allow_unexpected=unused, layout=source.layout)
    return dataclasses.replace(report, copied=copied)


def _start_from_other(task: Task, source: CheckpointPart, rule: HeadInit) -> LoadReport:
    """Initialise a head from a head of another task.

    Everything that the rule copies must exist, except parts that the task does not use or that are not transferable.
    """
    names = list(task.state_dict())
    modules = _modules(names)
    copies = {}
    for start, to in rule.copies.items():
        if to.split(".")[0] in modules and start.startswith(source.transferable):
            copies[start] = to
    tensors: dict[str, Tensor] = {}
    copied = []
    read = [*copies]  # prefixes of the other head's parameters that are of use

    def renamed(start: str, to: str) -> dict[str, Tensor]:
        """Return the parameters with the prefix `start`, which is replaced by `to`."""
        parameters = {}
        for name, value in source.tensors.items():
            if name.startswith(start):
                parameters[to + name.removeprefix(start)] = value
        return parameters

    for start, to in copies.items():
        parameters = renamed(start, to)
        tensors |= parameters
        if parameters:
            copied.append(f"{start.removesuffix('.')} -> {to.removesuffix('.')}")
    if rule.difference is not None:
        start, to = rule.difference
        read.append(start)
        parameters = renamed(start, to)
        tensors |= {name: value[1:2] - value[0:1] for name, value in parameters.items()}
        if parameters:
            copied.append(f"{start[:-1]} row 1 minus row 0 -> {to[:-1]}")
    if rule.answer_rows is not None:
        start, to = rule.answer_rows
        read.append(start)
        parameters = renamed(start, to)
        if parameters:
            theirs = _answers_beside(source.path)
            ours = task.answer_vocabulary.answers
            for name, value in parameters.items():
                tensors[name] = select_answer_rows(value, theirs, ours, name)
            count = sum(simplify_answer(answer) in theirs for answer in ours)
            copied.append(f"{start[:-1]} rows of {count} of {len(ours)} answers -> {to[:-1]}")
    copied_prefixes = tuple(copies.values())
    random = [name for name in names if name.startswith(rule.random) and not name.startswith(copied_prefixes)]
    report = load_weights(task, tensors, source.path, allow_missing=random, layout=source.layout)
    unread = [name for name in source.tensors if not name.startswith(tuple(read))]
    return dataclasses.replace(report, unexpected=[*report.unexpected, *unread], copied=copied)


def _modules(names: Iterable[str]) -> set[str]:
    """Return the names of the outermost modules of parameters."""
    return {name.split(".")[0] for name in names}


def _answers_beside(path: Path) -> list[str]:
    """Read the answers of a head in the order of its classes, from a list in the same folder."""
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
    classes = torch.tensor([class_of.get(simplify_answer(answer), -1) for answer in ours])  # -1: unknown
    selected = rows[classes.clamp(min=0)]
    is_known = (classes >= 0).view(-1, *[1] * (rows.ndim - 1))
    return selected * is_known


def _check_config(file: Path, encoder: nn.Module, fields: Sequence[str]) -> None:
    """Compare settings that no weight shape shows with the `config.json` of a weights file, if there is one."""
    path = file.parent / "config.json"
    if not path.is_file():
        return
    theirs = read_json(path, dict[str, Any])
    ours = encoder.config.to_dict()
    for name in fields:
        if name in theirs and name in ours and theirs[name] != ours[name]:
            raise UserError(
                f"{path}: {name} is {theirs[name]} there and {ours[name]} here; set encoder.config.{name} to it."
            )


def check_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UserError if the encoder was trained with another vocabulary, even one of the same size."""
    path = user_path(path)
    folders = [path / "model" / "tokenizer", path / "tokenizer"]  # of a run, of a model folder
    for encoder in (path, path.parent):  # the encoder's folder, or the folder of the encoder's file
        if encoder.name == "encoder":
            folders.append(encoder.parent / "tokenizer")
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        return
    theirs = load_tokenizer(folder).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs != ours:
        raise UserError(
            f"{path}: the encoder was trained with the {len(theirs)} wordpieces in {folder}, but this run has another "
            f"vocabulary of {len(ours)}; set data.vocabulary={folder}."
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
    """Find the weights file of a part: `encoder`, `task` or `phrases`.

    `name`: a run, a saved model, a folder, a file, or a model of the hub.
    """
    path = user_path(name)
    if path.is_file():
        return path
    if not path.exists() and looks_like_hub_name(name):
        try:
            cached_file(name, "config.json")  # raises every possible error first; also used by `load_encoder`
            new, old = FILES
            file = cached_file(name, new, _raise_exceptions_for_missing_entries=False) or cached_file(name, old)
        except (OSError, ValueError) as error:
            raise MissingFileError(
                f"{name}: neither a local path nor a model that could be downloaded from the hub "
                f"({first_line(error)}); check the name and the connection, or use a local file."
            ) from error
        return Path(file)
    for folder in (path / "model" / part, path / part, path):
        for file_name in FILES:
            if (folder / file_name).is_file():
                return folder / file_name
    raise MissingFileError(
        f"{path}: no weights for `{part}` found; use a run directory, a file, or a folder with {' or '.join(FILES)}."
    )


def _settings_of_run(folder: Path, part: str) -> dict[str, Any]:
    """Return the saved settings of the run that contains a part's folder; empty if there is none."""
    path = folder.absolute().parent / "config.yaml"
    if folder.absolute().name != part or not path.is_file():
        return {}
    return read_yaml(path)

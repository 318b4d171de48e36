"""Starting weights of an encoder and of a task's head: from our own runs, official VL-BERT files, and BERT.

What a path holds is told by its content:

- a run directory, the `model` folder in it, or its `encoder` or `task` folder; an encoder's `save_pretrained` folder;
- an official VL-BERT file (`.model`), see `e2e_vl.weights.vl_bert`;
- a BERT of transformers: folder, file, or hub name, see `e2e_vl.weights.bert`.

A model for another task starts as in the official code: see `TRANSFERS` and `load_encoder`. Everything else must fit,
and whatever stays random or unused is listed in the report.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from detector.checkpoint import LoadReport, load_weights
from detector.weight_files import read_tensors
from e2e_vl.data.formats.vqa_files import ANSWERS_FILE, read_answers
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.pretraining import PretrainingConfig, PretrainingTask
from e2e_vl.text import load_tokenizer, looks_like_hub_name
from e2e_vl.weights import bert
from e2e_vl.weights.vl_bert import (
    HEADS,
    PRETRAINING_EMBEDDINGS,
    REGION_CLASSES,
    TEACHER,
    from_official,
    is_official,
)

OWN = "this project"
PRETRAINING, BERT = "pretraining", bert.TASK_NAME
RELATIONSHIP = "relationship."
POOLER = "pooler."
SAME_CONFIG = (  # what no shape shows
    "num_attention_heads",
    "hidden_act",
    "layer_norm_eps",
    "geometry",
    "visual_part_on_end",
    "whole_image_in_sequence",
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """How a head starts from the heads of another task. All names are prefixes."""

    copies: Mapping[str, str]  # from -> to
    random: tuple[str, ...]  # of the new head, keeps its random start
    match_from_relationship: bool = False  # `head.output` = row "match" minus row "no match" of `relationship`


PRETRAINING_HEADS = tuple(sorted({f"{name.split('.')[0]}." for name in HEADS[PRETRAINING].values()}))
TO_VQA = Transfer(copies={"mlm.transform.": "head.transform."}, random=("head.output.",))
TRANSFERS = {  # (from, to); what is not copied is not used
    (PRETRAINING, "refcoco"): Transfer(
        copies={"region_classifier.transform.": "head.transform."}, random=("head.output.",)
    ),
    (PRETRAINING, "vqa"): TO_VQA,
    (PRETRAINING, "vcr"): Transfer(
        copies={"region_classifier.transform.": "region_classifier.transform."},
        random=("region_classifier.output.", "head.output."),
        match_from_relationship=True,
    ),
    (BERT, PRETRAINING): Transfer(
        copies={"mlm.": "mlm."}, random=tuple(name for name in PRETRAINING_HEADS if name != "mlm.")
    ),
    (BERT, "vqa"): TO_VQA,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Weights by our names, and where they come from."""

    path: Path
    layout: str  # whose names the file has
    task_name: str | None  # what they were trained for; "bert"; None: not known
    tensors: dict[str, Tensor]  # of the part that was asked for
    background_last: bool | None = None  # order of the region classes of pre-training; None: not known


def read_source(path: str | Path, part: Literal["encoder", "task"]) -> Source:
    """Read the encoder's or the task's weights of any kind.

    Raises:
        FileNotFoundError, ValueError: nothing there, or nothing that is known.
    """
    file, settings = _find(str(path), part)
    tensors = read_tensors(file)
    for recognise, convert, layout in ((is_official, from_official, "VL-BERT"), (bert.is_bert, bert.from_bert, "BERT")):
        if recognise(tensors):
            parts = convert(tensors, file)
            return Source(file, layout, parts.task_name, getattr(parts, part), background_last=False)
    own = {name: value for name, value in tensors.items() if not name.startswith(TEACHER)}
    settings = settings or {}
    choices = settings.get("config") or {}
    background_last = None
    if settings.get("name") == PRETRAINING:
        order = {key: choices[key] for key in ("teacher", "background") if key in choices}
        background_last = PretrainingConfig(**order).has_background_last
    return Source(file, OWN, settings.get("name"), own, background_last)


def load_encoder(encoder: nn.Module, path: str | Path, task_class: type[Task], *, task_name: str) -> LoadReport:
    """Start an encoder.

    As in the official code, VCR's segment row 1 (answers) becomes a copy of row 0 when it starts from pre-training,
    and what only pre-training or a pooled output needs may be missing or left over.

    Args:
        path: see the top of this file.
        task_name: what the encoder is for.

    Raises:
        FileNotFoundError, ValueError: nothing there, or it does not fit, or the `config.json` beside it says another
            number of heads, activation, epsilon or geometry.
    """
    source = read_source(path, "encoder")
    tensors, copied = source.tensors, []
    if source.layout != OWN and not isinstance(encoder, VLBertModel):
        raise ValueError(f"{source.path}: holds {source.layout}, which is no start for a {type(encoder).__name__}.")
    _check_config(source.path, encoder)
    may_miss: tuple[str, ...] = ()
    if source.task_name == BERT:
        tensors = bert.fit_to_encoder(tensors, encoder, source.path)
        copied.append("segment rows of BERT -> the first rows of embeddings.segment_embeddings")
        needed = tuple(f"{module}." for module in bert.ENCODER.values() if module != "pooler")
        may_miss = tuple(name for name in encoder.state_dict() if not name.startswith(needed))
    elif source.task_name is not None and source.task_name != task_name:
        may_miss = (POOLER,) if source.task_name == PRETRAINING else (POOLER, *PRETRAINING_EMBEDDINGS)
        if (source.task_name, task_name) == (PRETRAINING, "vcr") and bert.SEGMENTS in tensors:
            rows = tensors[bert.SEGMENTS].clone()
            rows[1] = rows[0]
            tensors = {**tensors, bert.SEGMENTS: rows}
            copied.append(f"{bert.SEGMENTS} row 0 -> row 1")
    is_transfer = source.task_name is not None
    report = load_weights(
        encoder,
        tensors,
        source.path,
        may_miss=may_miss,
        may_exceed=(POOLER, *PRETRAINING_EMBEDDINGS) if is_transfer else (),
        layout=source.layout,
    )
    return dataclasses.replace(report, copied=copied)


def _check_config(file: Path, encoder: nn.Module) -> None:
    """Compare what no shape shows with the `config.json` beside a weights file, if there is one."""
    path = file.parent / "config.json"
    if not path.is_file():
        return
    try:
        theirs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}.") from error
    own = encoder.config.to_dict()
    for name in SAME_CONFIG:
        if name in theirs and name in own and theirs[name] != own[name]:
            raise ValueError(
                f"{path}: {name} is {theirs[name]}, but the encoder's is {own[name]}; set encoder.config.{name} to "
                f"{theirs[name]}."
            )


def check_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a run's encoder numbers the wordpieces as the tokenizer does; nothing to compare is fine.

    Raises:
        ValueError: the run that the weights come from had another vocabulary, perhaps of the same size.
    """
    path = Path(path).expanduser()
    places = [path / "model", path]  # a run, a model folder
    places += [part.parent for part in (path, path.parent) if part.name == "encoder"]  # its part, the part's file
    folder = next((place / "tokenizer" for place in places if (place / "tokenizer").is_dir()), None)
    if folder is None:
        return
    theirs, own = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    if theirs != own:
        raise ValueError(
            f"{path}: its encoder knows the {len(theirs)} wordpieces in {folder}, not the {len(own)} of this run; set "
            f"data.vocabulary={folder}."
        )


def check_answers(folder: Path, task: nn.Module) -> None:
    """Check that a head of ours, in `folder`, has the task's list of answers; nothing to compare is fine.

    Raises:
        ValueError: the lists differ, perhaps only in their order.
    """
    path = folder / ANSWERS_FILE
    if hasattr(task, "answers") and path.is_file() and read_answers(path) != task.answers:
        raise ValueError(
            f"{path}: the head was trained for other answers than this run's, or for another order of them; set "
            f"task.config.answers={path}."
        )


def load_task(task: nn.Module, path: str | Path, *, task_name: str, knows_class_order: bool = True) -> LoadReport:
    """Start a task's head: of the same task as it is, of another one by the rules in `TRANSFERS`.

    Region classes of pre-training are put into the task's order (`PretrainingConfig.background`); official files have
    the background first. Heads of objectives that are switched off in the task may be left over. The frozen detector
    that pre-training learns from is none of its weights: it is a copy of the detector that the run starts with.

    Args:
        path: see the top of this file.
        task_name: what the head is for.
        knows_class_order: False: the order of the task's answers was made up. Official files do not name their answers,
            so the same list in the same order must be given.

    Raises:
        FileNotFoundError, ValueError: nothing there, no rule for such a start, or it does not fit.
    """
    source = read_source(path, "task")
    own = {f"{name.split('.')[0]}." for name in task.state_dict()}
    if source.task_name == task_name or (source.layout == OWN and source.task_name is None):
        check_answers(source.path.parent, task)
        if source.layout != OWN and not knows_class_order:
            raise ValueError(
                f"{source.path}: a head of {task_name} whose answers are known by their order only, and the list of "
                "this run was built from annotations, in an order of its own; give task.config.answers, the answer "
                "vocabulary that the file was trained with."
            )
        unused = tuple(name for name in PRETRAINING_HEADS if name not in own)  # VCR's region classifier is among them
        tensors, copied = _in_class_order(source, task)
        report = load_weights(task, tensors, source.path, may_miss=(TEACHER,), may_exceed=unused, layout=source.layout)
        return dataclasses.replace(report, copied=copied)
    transfer = TRANSFERS.get((source.task_name, task_name))
    if transfer is None:
        raise ValueError(
            f"{source.path}: holds {_described(source)}, and no rule says how the head of {task_name} starts from it; "
            "leave out task.weights."
        )
    wanted = {start: to for start, to in transfer.copies.items() if f"{to.split('.')[0]}." in own}
    tensors, copied = _transferred(source.tensors, dataclasses.replace(transfer, copies=wanted))
    used = (*wanted, *((RELATIONSHIP,) if transfer.match_from_relationship else ()))
    left = [name for name in source.tensors if not name.startswith(used)]
    unknown = [name for name in left if not name.startswith(PRETRAINING_HEADS)]
    if unknown:
        raise ValueError(f"{source.path}: {unknown[0]} is no part of a head of {source.task_name}.")
    report = load_weights(task, tensors, source.path, may_miss=(*transfer.random, TEACHER), layout=source.layout)
    return dataclasses.replace(report, unexpected=[*report.unexpected, *left], copied=copied)


def _in_class_order(source: Source, task: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """The head's weights with the background where pre-training has it, and a line that says what was moved."""
    tensors = source.tensors
    if not isinstance(task, PretrainingTask) or REGION_CLASSES[0] not in tensors:
        return tensors, []
    wanted = task.config.has_background_last
    if source.background_last in (None, wanted):
        return tensors, []
    moved = {name: tensors[name].roll(-1 if wanted else 1, dims=0) for name in REGION_CLASSES}
    return tensors | moved, [f"region_classifier.output, background becomes the {'last' if wanted else 'first'} class"]


def _transferred(tensors: Mapping[str, Tensor], transfer: Transfer) -> tuple[dict[str, Tensor], list[str]]:
    """The new head's weights and "from -> to" lines."""
    renamed, copied = {}, []
    for start, to in transfer.copies.items():
        found = {to + name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        renamed |= found
        if found:
            copied.append(f"{start[:-1]} -> {to[:-1]}")
    if transfer.match_from_relationship and f"{RELATIONSHIP}weight" in tensors:
        for end in ("weight", "bias"):
            rows = tensors[f"{RELATIONSHIP}{end}"]
            renamed[f"head.output.{end}"] = rows[1:2] - rows[0:1]  # row 1: match
        copied.append("relationship row 1 minus row 0 -> head.output")
    return renamed, copied


def _find(name: str, part: str) -> tuple[Path, dict[str, Any] | None]:
    """The weights file, and the `task` settings of the run beside it."""
    path = Path(name).expanduser()
    if path.is_file():
        return path, _task_of_run(path.parent, part)
    if not path.exists() and looks_like_hub_name(name):
        return bert.fetch_from_hub(name), None
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such weights file or folder.")
    for folder in (path / "model" / part, path / part, path):
        file = next((folder / file for file in bert.FILES if (folder / file).is_file()), None)
        if file is not None:
            return file, _task_of_run(folder, part)
    raise FileNotFoundError(
        f"{path}: holds no {part}'s weights; give a run directory, a file, or a folder with {' or '.join(bert.FILES)}."
    )


def _task_of_run(folder: Path, part: str) -> dict[str, Any] | None:
    """The `task` settings of the run that a part's folder lies in; None for a folder by itself."""
    path = folder.absolute().parent / "config.yaml"
    if folder.absolute().name != part or not path.is_file():
        return None
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings.get("task") if isinstance(settings, dict) else None


def _described(source: Source) -> str:
    if source.task_name is None:
        return "weights of an unknown task"
    return "a BERT" if source.task_name == BERT else f"the head of {source.task_name}"

"""A whole model in `save_pretrained` form, as it is saved in a run, in a checkpoint and by users.

model/
  config.yaml, detector/, encoder/, task/, perhaps teacher/ and phrases/, tokenizer/

It loads with `load_model` and needs no training code. No file of it can run code when it is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from detector.checkpoint import load_class_names, load_strictly, load_weights, save_settings
from detector.errors import MissingFileError, UserError
from detector.weight_files import read_tensors
from e2e_vl.config import VERSION, RunConfig, load_config, load_overrides, save_config, saved_version
from e2e_vl.data.formats.answer_files import ANSWERS_FILE, write_answers
from e2e_vl.engine.build import build_model, task_class
from e2e_vl.engine.earlier_rules import rules_of
from e2e_vl.model import VisionLanguageModel
from e2e_vl.plain_yaml import check_plain
from e2e_vl.run_files import errors_naming, model_folder
from e2e_vl.tasks.phrase_head import load_head
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.start import TEACHER, todays_names

# Settings that a trained model does not use.
OWN_START = (
    "detector.config",
    "detector.weights",
    "encoder.weights",
    "encoder.fallback_weights",
    "task.weights",
    "task.fallback_weights",
    "phrases.weights",
)


def save_model(folder: Path, config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write settings, weights (safetensors) and tokenizer; the encoder folder is a transformers checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder / "config.yaml")
    with _without_progress_bars():
        model.encoder.save_pretrained(folder / "encoder")
    parts = {"detector": model.detector, "task": model.task, "teacher": model.teacher, "phrases": model.phrase_head}
    for name, part in parts.items():
        if part is None:
            continue
        (folder / name).mkdir(exist_ok=True)
        tensors = {key: value.detach().contiguous().cpu() for key, value in part.state_dict().items()}
        save_file(tensors, folder / name / "model.safetensors")
    if model.task.answers:
        write_answers(folder / "task" / ANSWERS_FILE, model.task.answers)
    save_settings(model.detector, folder / "detector")
    tokenizer.save_pretrained(folder / "tokenizer")


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every file that it writes."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def load_model(
    folder: Path, *, overrides: list[str] | None = None
) -> tuple[RunConfig, VisionLanguageModel, PreTrainedTokenizerBase]:
    """Read what `save_model` wrote: the folder itself, or a run directory that holds it as `model/`.

    Everything comes from that folder, whatever paths its settings hold, and nothing is written.

    Args:
        overrides: `key=value` settings that change the saved ones, such as `data.root=DIR`, or
            `detector.overrides.TEST.DETECTIONS_PER_IMAGE=50` on top of the saved detector settings.

    Raises:
        FileNotFoundError: no model there, or a file of it is missing.
        ValueError: weights that do not fit the settings beside them, or are too few for them; or settings that refer to
            something outside of their file (see `check_plain`).
    """
    folder = model_folder(folder)
    for word in overrides or []:
        if word.partition("=")[0] in OWN_START:
            raise UserError(f"{word}: a trained model brings its own detector and weights; leave this setting out.")
    # what a part started from means nothing now, and may contradict a setting that is changed
    overrides = [*(overrides or []), "phrases.weights=null"]
    config = _without_start(saved_settings(folder, overrides), folder, overrides)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    _check_size(config, tokenizer, folder)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    load_strictly(model.detector, folder / "detector" / "model.safetensors")
    load_class_names(model.detector, folder / "detector")
    load_strictly(model.encoder, folder / "encoder" / "model.safetensors")
    _load_task(model, folder)
    if model.phrase_head is not None:
        load_head(model.phrase_head, folder / "phrases" / "model.safetensors")
    return config, model.eval(), tokenizer


def _check_size(config: RunConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Compare the number of parameters with the weights before memory is taken for them.

    Raises:
        UserError: the settings ask for more parameters than the weights have bytes.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"), errors_naming(folder / "config.yaml"):
        model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    number = sum(parameter.numel() for parameter in model.parameters())
    held = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    if number > held:
        raise UserError(
            f"{folder}: its settings ask for {number} parameters, and its weights have {held} bytes; get the whole "
            "folder again."
        )


def saved_settings(run_dir: Path, overrides: list[str] | None = None) -> RunConfig:
    """The settings that a model was saved with; settings of an earlier version come in today's form.

    Raises:
        FileNotFoundError: no model there.
        ValueError: settings that refer to something outside of their file, or a value that may mean two rules.
    """
    path = model_folder(run_dir) / "config.yaml"
    check_plain(path)
    in_todays_words = rules_of(path, overrides or [])
    if saved_version(path) == VERSION:
        return load_config(path, overrides, upgrade=in_todays_words)

    def upgrade(content: dict[str, Any]) -> None:
        with errors_naming(path):
            _upgrade(content)
        in_todays_words(content)

    return load_config(path, overrides, upgrade=upgrade)


def _upgrade(content: dict[str, Any]) -> None:
    """The settings of an earlier version in today's form, in place. Sections that are no mappings are left as they are:
    reading them says so."""
    task, data = content.get("task"), content.get("data")
    if not isinstance(task, dict) or not isinstance(data, dict):
        return
    resize = data.get("resize")
    rounding = resize.get("rounding") if isinstance(resize, dict) else None
    if isinstance(rounding, str) and rounding != "detectron2":  # the other one had another name
        resize["rounding"] = "truncate"
    options = [section.setdefault("config", {}) for section in (task, data)]
    if isinstance(task.get("name"), str) and all(isinstance(one, dict) for one in options):
        task_class(task["name"]).upgrade(task["config"], data)


def _without_start(config: RunConfig, folder: Path, overrides: list[str]) -> RunConfig:
    """The settings of a saved model: detector and answers are its own, and nothing else is loaded.

    Raises:
        FileNotFoundError: the detector's settings or the answers are missing.
        ValueError: detector settings that refer to something outside of their file.
    """
    check_plain(folder / "detector" / "config.yaml")
    changes = [word for word in overrides if word.startswith("detector.overrides.")]
    detector = dataclasses.replace(
        config.detector,
        config=str(folder / "detector" / "config.yaml"),
        overrides=load_overrides(changes).get("overrides", {}),
        weights=None,
    )
    answers, own = folder / "task" / ANSWERS_FILE, {}
    if task_class(config.task.name).chooses_answers:
        if not answers.is_file():
            raise MissingFileError(
                f"{answers}: the model lacks its list of answers; save the model again, or get the whole folder."
            )
        own = {"answers": str(answers)}
    elif answers.is_file():  # of one of its objectives
        objectives = config.task.config["objectives"]
        own = {"objectives": {name: _with_answers(value, answers) for name, value in objectives.items()}}
    return dataclasses.replace(
        config,
        detector=detector,
        encoder=dataclasses.replace(config.encoder, weights=None, fallback_weights=None),
        task=dataclasses.replace(
            config.task, weights=None, fallback_weights=None, config={**config.task.config, **own}
        ),
    )


def _with_answers(settings: Any, path: Path) -> Any:
    """The settings of an objective; one that chooses from a list of answers reads it from the model's own file."""
    if not isinstance(settings, dict) or "answers" not in settings:
        return settings
    return settings | {"answers": str(path), "answer_sources": None}


def _load_task(model: VisionLanguageModel, folder: Path) -> None:
    """Weights of the head and of the teacher; models of an earlier version hold both in one file, with other names."""
    path = folder / "task" / "model.safetensors"
    tensors = read_tensors(path)
    teacher = {name.removeprefix(TEACHER): value for name, value in tensors.items() if name.startswith(TEACHER)}
    own = todays_names(tensors, type(model.task))
    own = {name: value for name, value in own.items() if name in model.task.state_dict() or name in tensors}
    load_weights(model.task, own, path)
    if model.teacher is not None:
        path = path if teacher else folder / "teacher" / "model.safetensors"
        load_weights(model.teacher, teacher or read_tensors(path), path)

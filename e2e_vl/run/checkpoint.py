"""Checkpoints: the model in `save_pretrained` form, and Accelerate's state to continue exactly.

step_00001000/
  model/          config.yaml, detector/, encoder/, task/, perhaps phrases/, tokenizer/: loads with `load_model`, needs
                  no training code
  state/          weights, optimiser and random states of every process (Accelerate)
  step.json       position in the run
  checksums.json  of all these files; a resumed run passes over checkpoints whose files are damaged

A checkpoint is written beside its place and renamed when it is complete. No file of it can run code when it is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from detector.checkpoint import load_class_names, load_strictly, save_settings
from detector.errors import MissingFileError, UserError
from detector.io import atomic_folder, decode_yaml, read_json, write_json
from e2e_vl.config import RunConfig, differences, load_config, parse_overrides, read_detector_config, save_config
from e2e_vl.data.answer_lists import ANSWERS_FILE, write_answers
from e2e_vl.io import find_damage, model_folder, write_checksums
from e2e_vl.model import VisionLanguageModel
from e2e_vl.parts import TASKS, Settings
from e2e_vl.run.build import build_model
from e2e_vl.run.guards import LOCK_FILE
from e2e_vl.run.launch import on_main
from e2e_vl.text import load_tokenizer

logger = logging.getLogger(__name__)
OWN_START = (  # settings that a trained model does not use
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
    for name, part in _parts(model).items():
        if name != "encoder":
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
        MissingFileError: no model there, or a file of it is missing.
        UserError: weights that do not fit the settings beside them.
    """
    folder = model_folder(folder)
    for word in overrides or []:
        if word.partition("=")[0] in OWN_START:
            raise UserError(f"{word}: a trained model brings its own detector and weights; leave this setting out.")
    # what the phrase head started from may contradict a setting that is changed
    overrides = [*(overrides or []), "phrases.weights=null"]
    config = saved_settings(folder, overrides)
    changes = parse_overrides(word for word in overrides if word.startswith("detector.overrides."))
    detector = replace(
        config.detector,
        config=str(folder / "detector" / "config.yaml"),
        overrides=changes.get("detector", {}).get("overrides", {}),
    )
    settings = _with_answers(config, folder / "task" / ANSWERS_FILE)
    config = replace(
        config,
        detector=detector,
        encoder=replace(config.encoder, weights=None, fallback_weights=None),
        task=replace(config.task, weights=None, fallback_weights=None, config=settings),
    )
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    # the settings keep the start of the detector, which tells whether its boxes are random
    unloaded = replace(config, detector=replace(detector, weights=None))
    model = build_model(unloaded, vocab_size=len(tokenizer), tokenizer=tokenizer)
    load_class_names(model.detector, folder / "detector")
    for name, part in _parts(model).items():
        load_strictly(part, folder / name / "model.safetensors")
    return config, model.eval(), tokenizer


def _parts(model: VisionLanguageModel) -> dict[str, nn.Module]:
    """The parts that are saved, by the name of their folder."""
    parts = {"detector": model.detector, "encoder": model.encoder, "task": model.task}
    parts |= {"teacher": model.teacher, "phrases": model.phrase_head}
    return {name: part for name, part in parts.items() if part is not None}


def saved_settings(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings that a model was saved with."""
    return load_config(model_folder(run_dir) / "config.yaml", overrides)


def _with_answers(config: RunConfig, answers: Path) -> Settings:
    """The settings of the task, with the saved list of answers as its own, or as that of its objectives."""
    settings = config.task.config
    if TASKS[config.task.name].cls.chooses_answers:
        return replace(settings, answers=str(answers))
    if not answers.is_file():
        return settings
    objectives = {
        name: replace(own, answers=str(answers), answer_sources=None) if hasattr(own, "answers") else own
        for name, own in settings.objectives.items()
    }
    return replace(settings, objectives=objectives)


# Checkpoints of a run

POSITION_FILE = "step.json"


def save_state(
    accelerator: Accelerator,
    folder: Path,
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    position: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint folder, then remove all but the `keep` newest; called on every process.

    Checkpoints of later steps, which a run passed over or leaves behind, are removed too.

    Args:
        position: `step` and whatever else of the run's position JSON can hold; `load_state` returns it.
    """
    bad = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"{bad[0]} became NaN or infinite, so nothing is saved; lower train.lr, or set train.clip_norm. --resume "
            "continues from the newest checkpoint."
        )
    with contextlib.ExitStack() as writing:
        part = on_main(accelerator, lambda: writing.enter_context(atomic_folder(folder)))
        accelerator.save_state(str(part / "state"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save_model(part / "model", config, model, tokenizer)
            write_json(part / POSITION_FILE, {**position, "processes": accelerator.num_processes})
            write_checksums(part)
    if accelerator.is_main_process:
        every = complete_checkpoints(folder.parent.parent)
        kept = [one for one in every if one.name <= folder.name][-keep:]
        for old in set(every).difference(kept):
            (old / POSITION_FILE).unlink()  # from now on it is incomplete
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """Continue from a checkpoint folder; returns the position that was saved with it.

    The optimiser keeps the options (rates, decay, ...) of the current settings, which it was built with.
    """
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    accelerator.load_state(str(folder / "state"))
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return read_json(folder / POSITION_FILE)


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run directory that were written to the end, oldest first."""
    return sorted(path.parent for path in (run_dir / "checkpoints").glob(f"step_*/{POSITION_FILE}"))


def find_resumable(output: Path, config: RunConfig, num_processes: int) -> Path | None:
    """The newest undamaged checkpoint of a run directory, or None if the run never saved one.

    Settings may differ from the settings of the checkpoint where they leave the architecture; they are logged.
    """
    if not output.is_dir():
        raise MissingFileError(f"Cannot resume: run directory {output} does not exist; start without --resume.")
    folders, damaged = complete_checkpoints(output), []
    while folders and (damage := find_damage(folders[-1])) is not None:
        damaged.append(f"{folders.pop()} is damaged ({damage})")
    if damaged and not folders:
        raise UserError(
            f"Cannot resume: {'; '.join(damaged)}; copy another checkpoint there, or choose another `output`."
        )
    if not folders:
        return None
    folder = folders[-1]
    if damaged:
        logger.warning("%s; the run goes on from %s.", "; ".join(damaged), folder)
    written = saved_settings(folder / "model")
    detector = replace(written.detector, config=str(folder / "model/detector/config.yaml"), overrides={})
    processes = read_json(folder / POSITION_FILE)["processes"]
    changed = differences(
        _architecture(replace(written, detector=detector), processes), _architecture(config, num_processes)
    )
    if changed:
        raise UserError(
            f"Cannot resume from {folder}: its architecture or number of processes differs from the settings "
            f"({'; '.join(changed[:3])}); resume with those in its model/config.yaml, or choose another `output`."
        )
    changed = [line for line in differences(written, config) if not line.startswith("output:")]
    if changed:
        logger.warning("Resuming %s with other settings than before: %s", output, "; ".join(changed))
    return folder


def _architecture(config: RunConfig, processes: int) -> dict[str, Any]:
    """What must not change in a resumed run: which parameters exist, what they mean, and the number of processes."""
    return {
        "detector": decode_yaml(read_detector_config(config.detector).to_yaml(), config.detector.config),
        "encoder": {"name": config.encoder.name, **msgspec.to_builtins(config.encoder.config)},
        "task": {"name": config.task.name, **msgspec.to_builtins(config.task.config)},
        "phrases": {"layer": config.phrases.layer, "size": config.phrases.size} if config.phrases.weight else None,
        "number of processes": processes,
    }


def refuse_to_overwrite(output: Path) -> None:
    """A new run needs an empty folder, or one whose run was stopped before its first checkpoint."""
    is_run = (output / LOCK_FILE).exists()
    has_results = bool(complete_checkpoints(output)) or (output / "metrics.json").exists()
    has_other_files = not is_run and output.exists() and (output.is_file() or any(output.iterdir()))
    if has_results or has_other_files:
        raise UserError(
            f"{output} holds a run or other files; continue a run with --resume, or choose another `output`."
        )

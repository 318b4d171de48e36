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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from detector.checkpoint import load_class_names, load_strictly, save_settings
from detector.errors import MissingFileError, UserError
from detector.io import atomic_folder, decode_yaml, read_json, read_yaml, write_json
from e2e_vl.config import RunConfig, differences, load_config, parse_overrides, read_detector_config, save_config
from e2e_vl.data.answer_lists import ANSWERS_FILE, write_answers
from e2e_vl.io import find_damage, model_folder, write_checksums
from e2e_vl.model import VisionLanguageModel
from e2e_vl.parts import TASKS
from e2e_vl.run.build import build_model
from e2e_vl.run.guards import disk_errors_named
from e2e_vl.run.launch import on_main
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.start import check_answers, check_vocabulary

logger = logging.getLogger(__name__)

# A whole model in `save_pretrained` form, as it is saved in a run, in a checkpoint and by users.


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
        MissingFileError: no model there, or a file of it is missing.
        UserError: weights that do not fit the settings beside them.
    """
    folder = model_folder(folder)
    for word in overrides or []:
        if word.partition("=")[0] in OWN_START:
            raise UserError(f"{word}: a trained model brings its own detector and weights; leave this setting out.")
    # what a part started from means nothing now, and may contradict a setting that is changed
    overrides = [*(overrides or []), "phrases.weights=null"]
    config = _without_start(saved_settings(folder, overrides), folder, overrides)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer, is_saved=True)
    load_class_names(model.detector, folder / "detector")
    parts = {"detector": model.detector, "encoder": model.encoder, "task": model.task}
    parts |= {"teacher": model.teacher, "phrases": model.phrase_head}
    for name, part in parts.items():
        if part is not None:
            load_strictly(part, folder / name / "model.safetensors")
    return config, model.eval(), tokenizer


def saved_settings(run_dir: Path, overrides: list[str] | None = None) -> RunConfig:
    """The settings that a model was saved with.

    Raises:
        MissingFileError: no model there.
    """
    return load_config(model_folder(run_dir) / "config.yaml", overrides or ())


def _without_start(config: RunConfig, folder: Path, overrides: list[str]) -> RunConfig:
    """The settings of a saved model: detector and answers are its own, and nothing else is loaded."""
    replace = msgspec.structs.replace
    changes = parse_overrides(word for word in overrides if word.startswith("detector.overrides."))
    detector = replace(
        config.detector,
        config=str(folder / "detector" / "config.yaml"),
        overrides=changes.get("detector", {}).get("overrides", {}),
    )
    answers, own = folder / "task" / ANSWERS_FILE, config.task.config
    if TASKS[config.task.name].cls.chooses_answers:
        if not answers.is_file():
            raise MissingFileError(
                f"{answers}: the model lacks its list of answers; save the model again, or get the whole folder."
            )
        own = replace(own, answers=str(answers))
    elif answers.is_file():  # of one of its objectives
        objectives = {
            name: replace(value, answers=str(answers), answer_sources=None) if hasattr(value, "answers") else value
            for name, value in own.objectives.items()
        }
        own = replace(own, objectives=objectives)
    return replace(
        config,
        detector=detector,
        encoder=replace(config.encoder, weights=None, fallback_weights=None),
        task=replace(config.task, weights=None, fallback_weights=None, config=own),
    )


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

    Raises:
        FloatingPointError: weights are NaN or infinite; nothing is written.
        DiskError: the disk is full; nothing of it is left, and the earlier checkpoints are as they were.
    """
    bad = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"{bad[0]} became NaN or infinite, so nothing is saved; lower train.lr, or set train.clip_norm. --resume "
            "continues from the newest checkpoint."
        )
    with disk_errors_named(folder), contextlib.ExitStack() as writing:
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
    try:
        accelerator.load_state(str(folder / "state"))
    except ValueError as error:  # of torch, about other parameter groups
        raise UserError(f"Cannot continue from {folder} ({error}); resume with its own settings.") from error
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return read_json(folder / POSITION_FILE)


def check_lists(folder: Path, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that wordpieces and answers, which a resumed run reads or builds again, have kept their numbers.

    Raises:
        UserError: a list differs from the list in the checkpoint folder, perhaps only in its order.
    """
    check_vocabulary(folder / "model" / "encoder", tokenizer)
    check_answers(folder / "model" / "task", model.task)


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run directory that were written to the end, oldest first."""
    return sorted(path.parent for path in (run_dir / "checkpoints").glob(f"step_*/{POSITION_FILE}"))


def newest_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint of a run directory whose files are as they were written, or None if there never was one.

    Damaged ones are passed over with a warning.

    Raises:
        UserError: all are damaged.
    """
    damaged: list[str] = []
    for folder in reversed(complete_checkpoints(output)):
        damage = find_damage(folder)
        if damage is None:
            if damaged:
                logger.warning("%s; the run goes on from %s.", "; ".join(damaged), folder)
            return folder
        damaged.append(f"{folder} is damaged ({damage})")
    if damaged:
        raise UserError(
            f"Cannot resume: {'; '.join(damaged)}; copy another checkpoint there, or choose another `output`."
        )
    return None


def find_resumable(output: Path, config: RunConfig, num_processes: int) -> Path | None:
    """The newest undamaged checkpoint of a run directory, or None if the run never saved one.

    Settings may differ from the settings of the checkpoint where they leave the architecture; they are logged.

    Raises:
        UserError: the checkpoint was made by another architecture, or by another number of processes; or all
            checkpoints are damaged.
        MissingFileError: the run directory does not exist.
    """
    if not output.is_dir():
        raise MissingFileError(f"Cannot resume: run directory {output} does not exist; start without --resume.")
    folder = newest_checkpoint(output)
    if folder is None:
        return None
    written = saved_settings(folder / "model")
    as_saved = msgspec.structs.replace(
        written.detector, config=str(folder / "model/detector/config.yaml"), overrides={}
    )
    saved = msgspec.structs.replace(written, detector=as_saved)
    changed = differences(_architecture(saved), _architecture(config))
    if changed:
        raise UserError(
            f"Cannot resume from {folder}: its architecture differs from the settings ({'; '.join(changed[:3])}); "
            "resume with the settings in its model/config.yaml, or choose another `output`."
        )
    processes = read_json(folder / POSITION_FILE)["processes"]
    if processes != num_processes:
        raise UserError(
            f"Cannot resume from {folder}: it was saved by {processes} processes, and this run has {num_processes}; "
            f"launch it with --num_processes {processes}."
        )
    changed = [line for line in differences(written, config) if not line.startswith("output:")]
    if changed:
        logger.warning("Resuming %s with other settings than before: %s", output, "; ".join(changed))
    return folder


def _architecture(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which parameters exist and what they mean."""
    return {
        "detector": decode_yaml(read_detector_config(config.detector).to_yaml(), config.detector.config),
        "encoder": {"name": config.encoder.name, **msgspec.to_builtins(config.encoder.config)},
        "task": {"name": config.task.name, **msgspec.to_builtins(config.task.config)},
        "phrases": {"layer": config.phrases.layer, "size": config.phrases.size} if config.phrases.weight else None,
    }


def refuse_to_overwrite(output: Path) -> None:
    """Raises UserError if the run directory already holds a run, or anything that is no run, or is no directory.

    A run that was stopped before its first checkpoint may begin again.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another `output`, a directory for the run.")
    if complete_checkpoints(output) or (output / "metrics.json").exists():
        raise UserError(f"{output} already holds a run; continue it with --resume, or choose another `output`.")
    if output.exists() and not _is_run(output) and any(not path.name.startswith(".") for path in output.iterdir()):
        raise UserError(
            f"{output} is not empty and holds no run; choose another `output`, so that nothing in it is overwritten."
        )


def _is_run(folder: Path) -> bool:
    """Whether a folder has the complete settings that a run writes first; what people write has fewer keys."""
    path = folder / "config.yaml"
    content = read_yaml(path) if path.is_file() else None
    return isinstance(content, dict) and {"output", "detector", "encoder", "task", "data", "train"} <= content.keys()

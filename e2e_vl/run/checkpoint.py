"""Checkpoints: the model in `save_pretrained` form, and Accelerate's state for exact resumption.

step_00001000/
  model/          config.yaml, detector/, encoder/, task/, phrases/ (optional), tokenizer/; see `load_model`
  state/          optimiser and RNG states of every process (Accelerate); with train.ema_decay, where model/ has the
                  averaged weights, the raw ones too
  step.json       position in the run
  checksums.json  of all these files; damaged checkpoints are skipped on resume

A checkpoint is written to a temporary folder and renamed when complete. Loading one executes no code from it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from detector.checkpoint import check_arrays, load_weights, read_class_names, read_tensors, save_settings, save_weights
from detector.errors import MissingFileError, UserError
from detector.io import atomic_folder, decode_yaml, read_json, write_json
from e2e_vl.config import RunConfig
from e2e_vl.config_files import differences, load_config, parse_overrides, read_detector_config, save_config
from e2e_vl.data.answer_lists import ANSWERS_FILE
from e2e_vl.io import POSITION_FILE, find_checksum_mismatch, find_model_folder, write_checksums
from e2e_vl.model import VisionLanguageModel
from e2e_vl.registry import TASKS, Config
from e2e_vl.run.build import build_model
from e2e_vl.run.ema import WeightAverage
from e2e_vl.run.launch import on_main
from e2e_vl.text import load_tokenizer

logger = logging.getLogger(__name__)

RAW_WEIGHTS_FILE = "state/model.safetensors"  # where model/ has their average, and in checkpoints of before
AVERAGE_FILE = "state/average.safetensors"  # in checkpoints of before
START_SETTINGS = (  # settings that a trained model does not use
    "detector.config",
    "detector.weights",
    "encoder.weights",
    "encoder.fallback_weights",
    "task.weights",
    "task.fallback_weights",
    "phrases.weights",
    "box_refinement.weights",
)


@contextlib.contextmanager
def translate_full_disk(folder: Path) -> Iterator[None]:
    """Convert the errors that torch and safetensors raise on a full disk, or beyond a quota or limit, to an OSError."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        number = re.search(r"\(os error (\d+)\)", str(error))  # of safetensors
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        if shutil.disk_usage(folder).free <= 1 << 20:  # bytes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        if "inline_container" in str(error):  # the writer of torch, which does not say why
            reason = "A file was cut off; a quota or a limit of file sizes may be reached"
            raise OSError(errno.EIO, reason, str(folder)) from error
        raise


def save_model(folder: Path, config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write settings, weights (safetensors) and tokenizer; the encoder folder is a transformers checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder / "config.yaml")
    with translate_full_disk(folder), _without_progress_bars():
        model.encoder.save_pretrained(folder / "encoder")
        for name, module in _saved_modules(model).items():
            if name != "encoder":
                save_weights(module.state_dict(), folder / name / "model.safetensors")
    if model.task.answer_vocabulary is not None:
        write_json(folder / "task" / ANSWERS_FILE, model.task.answer_vocabulary.answers)
    save_settings(model.detector, folder / "detector")
    tokenizer.save_pretrained(folder / "tokenizer")


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable the progress bar that transformers shows for every file it writes."""
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
    """Load a model that `save_model` wrote. Paths of weights in its settings are ignored.

    Args:
        overrides: `key=value` settings that change the saved ones, such as `data.root=DIR` or
            `detector.overrides.TEST.DETECTIONS_PER_IMAGE=50`.

    Raises:
        MissingFileError: there is no model, or one of its files is missing.
        UserError: the weights do not match the settings.
    """
    folder = find_model_folder(folder)
    for word in overrides or []:
        if word.partition("=")[0] in START_SETTINGS:
            raise UserError(f"{word}: a trained model includes its detector and weights; leave this setting out.")
    # phrases.weights without phrases.weight is an error, and an override may set the latter to 0
    without_starts = ["phrases.weights=null", "box_refinement.weights=null"]
    config = _use_saved_files(folder, [*(overrides or []), *without_starts])
    config = replace(
        config,
        encoder=replace(config.encoder, weights=None, fallback_weights=None),
        task=replace(config.task, weights=None, fallback_weights=None),
    )
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    # the returned settings keep detector.weights: `proposes_at_random` needs it
    unloaded = replace(config, detector=replace(config.detector, weights=None, backbone_weights=False))
    num_classes = read_detector_config(unloaded.detector).roi_heads.num_classes
    class_names = read_class_names(folder / "detector", num_classes)
    model = build_model(unloaded, vocab_size=len(tokenizer), tokenizer=tokenizer, class_names=class_names)
    _load_saved_weights(model, folder)
    return config, model.eval(), tokenizer


def load_initial_model(folder: Path) -> tuple[RunConfig, VisionLanguageModel, PreTrainedTokenizerBase]:
    """Build the model that a saved one was trained from: with its initial weights, or the same random ones.

    Raises:
        MissingFileError: the weights that it started from are not there any more.
    """
    folder = find_model_folder(folder)
    config = _use_saved_files(folder)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    num_classes = read_detector_config(config.detector).roi_heads.num_classes
    class_names = read_class_names(folder / "detector", num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer, class_names=class_names)
    return config, model.eval(), tokenizer


def _use_saved_files(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of a saved model, with the detector's settings and the answers that lie beside it."""
    config = load_saved_config(folder, overrides)
    changes = parse_overrides(word for word in overrides if word.startswith("detector.overrides."))
    detector = replace(
        config.detector,
        config=str(folder / "detector" / "config.yaml"),
        overrides=changes.get("detector", {}).get("overrides", {}),
    )
    settings = _with_answers(config, folder / "task" / ANSWERS_FILE)
    return replace(config, detector=detector, task=replace(config.task, config=settings))


def _saved_modules(model: VisionLanguageModel) -> dict[str, nn.Module]:
    """Return the modules that are saved, by folder name."""
    modules = {"detector": model.detector, "encoder": model.encoder, "task": model.task}
    if model.teacher is not None:
        modules["teacher"] = model.teacher
    if model.phrase_head is not None:
        modules["phrases"] = model.phrase_head
    if model.box_refinement is not None:
        modules["box_refinement"] = model.box_refinement
    return modules


def _load_saved_weights(model: VisionLanguageModel, folder: Path) -> None:
    """Load the weights that `save_model` wrote; raise a UserError if they do not match the model."""
    for name, module in _saved_modules(model).items():
        file = folder / name / "model.safetensors"
        load_weights(module, read_tensors(file), file)


def load_saved_config(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the settings that a run or a saved model was trained with."""
    return load_config(find_model_folder(run_dir) / "config.yaml", overrides)


def _with_answers(config: RunConfig, answers: Path) -> Config:
    """Return the settings of the task, with the path of the saved answers in them or in those of its objectives."""
    settings = config.task.config
    if TASKS[config.task.name].cls.vocabulary_class is not None:
        return replace(settings, answers=str(answers))
    if not answers.is_file():
        return settings
    objectives = dict(settings.objectives)
    for name, objective in settings.objectives.items():
        if hasattr(objective, "answers"):
            objectives[name] = replace(objective, answers=str(answers), answer_sources=None)
    return replace(settings, objectives=objectives)


# Checkpoints of a run


def save_state(
    accelerator: Accelerator,
    folder: Path,
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    average: WeightAverage,
    position: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint, then remove all but the `keep` newest; called on every process.

    Checkpoints of later steps (skipped as damaged on resume) are removed too.

    Args:
        average: of the weights of the model, for `model/`; with `train.ema_decay`, `state/` has the raw weights.
        position: `step` and other JSON values; `load_state` returns them.
    """
    bad = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"{bad[0]} is NaN or infinite, so no checkpoint is saved; lower train.lr, or set train.max_grad_norm. "
            "--resume continues from the newest checkpoint."
        )
    with contextlib.ExitStack() as writing:
        part = on_main(accelerator, lambda: writing.enter_context(atomic_folder(folder)))
        if average.decay is None:
            hook = accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
            writing.callback(hook.remove)
        with translate_full_disk(part):
            accelerator.save_state(str(part / "state"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with average.applied():
                save_model(part / "model", config, model, tokenizer)
            counts = {"averaged_updates": average.updates, "processes": accelerator.num_processes}
            write_json(part / POSITION_FILE, {**position, **counts})
            write_checksums(part)
    if accelerator.is_main_process:
        checkpoints = list_checkpoints(folder.parent.parent)
        newest = [checkpoint for checkpoint in checkpoints if checkpoint.name <= folder.name][-keep:]
        for old in set(checkpoints).difference(newest):
            (old / POSITION_FILE).unlink()  # marks it as incomplete
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_state(
    accelerator: Accelerator, model: VisionLanguageModel, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, Any]:
    """Restore the state of a checkpoint; returns its position.

    The optimiser keeps the options (learning rates, decay, ...) of the current settings.
    """
    options = []
    for group in optimizer.param_groups:
        options.append({key: value for key, value in group.items() if key != "params"})
    for path in sorted((folder / "state").iterdir()):
        if path.suffix in (".bin", ".pkl"):
            check_arrays(path)
    with contextlib.ExitStack() as loading:
        if not (folder / RAW_WEIGHTS_FILE).is_file():
            _load_saved_weights(model, folder / "model")
            hook = accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
            loading.callback(hook.remove)
        accelerator.load_state(str(folder / "state"))
    for group, current in zip(optimizer.param_groups, options, strict=True):
        group.update(current)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # the count of updates; a checkpoint of another version may have it elsewhere
                state["step"] = state["step"].to(parameter.device if group["fused"] else "cpu")
    return read_json(folder / POSITION_FILE)


def load_average(average: WeightAverage, model: VisionLanguageModel, folder: Path) -> None:
    """Restore the average of the weights; in a checkpoint without one it begins with the weights of that step."""
    if average.decay is None:
        return
    path = folder / AVERAGE_FILE
    if path.is_file():
        average.load_state_dict(load_file(path))
        return
    with average.applied():
        _load_saved_weights(model, folder / "model")
    average.updates = read_json(folder / POSITION_FILE).get("averaged_updates", 0)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """List the complete checkpoints of a run directory, oldest first."""
    return sorted(path.parent for path in (run_dir / "checkpoints").glob(f"step_*/{POSITION_FILE}"))


def _find_damage(folder: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if it is intact."""
    if not (folder / POSITION_FILE).is_file():
        return f"{POSITION_FILE} is missing"
    return find_checksum_mismatch(folder)


def find_resumable(output: Path, config: RunConfig, num_processes: int) -> Path | None:
    """Find the newest intact checkpoint of a run directory; None, with a warning, if the run has none.

    Settings that do not affect the architecture may differ from those of the checkpoint; changes are logged.
    """
    if not output.is_dir():
        raise MissingFileError(f"Cannot resume: run directory {output} does not exist; start without --resume.")
    folders = sorted(path for path in (output / "checkpoints").glob("step_*") if path.is_dir())
    damaged: list[str] = []
    while folders:
        damage = _find_damage(folders[-1])
        if damage is None:
            break
        damaged.append(f"{folders.pop()} is damaged ({damage})")
    if damaged and not folders:
        raise UserError(f"Cannot resume: {'; '.join(damaged)}; restore a copy, or choose another `output`.")
    if not folders and (output / "metrics.json").exists():
        raise UserError(f"Cannot resume: {output} has a trained model but no checkpoint; choose another `output`.")
    if not folders:
        logger.warning("%s has no checkpoint, so the training starts from the beginning.", output)
        return None
    folder = folders[-1]
    if damaged:
        logger.warning("%s; resuming from %s.", "; ".join(damaged), folder)
    written = load_saved_config(folder / "model")
    detector = replace(written.detector, config=str(folder / "model/detector/config.yaml"), overrides={})
    changed = differences(_architecture(replace(written, detector=detector)), _architecture(config))
    if changed:
        raise UserError(
            f"Cannot resume from {folder}: its architecture differs from the settings ({'; '.join(changed[:3])}); "
            "resume with those in its model/config.yaml, or choose another `output`."
        )
    processes = read_json(folder / POSITION_FILE)["processes"]
    if processes != num_processes:
        logger.warning(
            "%s was saved by %d processes, and %d resume it: each step has the same images, but dropout and RoI "
            "sampling draw other random numbers.",
            folder,
            processes,
            num_processes,
        )
    changed = [line for line in differences(written, config) if not line.startswith("output:")]
    if changed:
        logger.warning("Resuming %s with changed settings: %s", output, "; ".join(changed))
    return folder


def _architecture(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the architecture, which must not change in a resumed run."""
    phrases = None
    if config.phrases.weight:
        phrases = {"layer": config.phrases.layer, "size": config.phrases.size}
    return {
        "detector": decode_yaml(read_detector_config(config.detector).to_yaml(), config.detector.config),
        "encoder": {"name": config.encoder.name, **msgspec.to_builtins(config.encoder.config)},
        "task": {"name": config.task.name, **msgspec.to_builtins(config.task.config)},
        "phrases": phrases,
        "box_refinement": config.box_refinement.weight > 0,
        "segmentation": config.segmentation.weight > 0,
    }

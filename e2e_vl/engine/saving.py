"""Checkpoints: the model in `save_pretrained` form, and Accelerate's state to continue exactly.

step_00001000/
  model/       config.yaml, detector/, encoder/, task/, perhaps phrases/, tokenizer/: loads with `load_model`, needs no
               training code
  state/       weights, optimiser and random states of every process (Accelerate)
  step.json    position in the run; written last, so a folder without it was cut off while saving

No file of a checkpoint can run code when it is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import load as load_without_code
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from detector.checkpoint import load_class_names, load_strictly, load_weights, save_settings
from detector.weight_files import read_tensors
from e2e_vl.config import VERSION, RunConfig, differences, load_config, load_overrides, save_config, saved_version
from e2e_vl.data.formats.answer_files import ANSWERS_FILE, write_answers
from e2e_vl.detector_yaml import read_detector_config
from e2e_vl.engine.build import build_model, task_class
from e2e_vl.model import VisionLanguageModel
from e2e_vl.plain_yaml import check_plain
from e2e_vl.run_files import model_folder, write_json
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.start import TEACHER, check_answers, check_vocabulary, todays_names

logger = logging.getLogger(__name__)
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
        ValueError: weights that do not fit the settings beside them, or settings that refer to something outside of
            their file (see `check_plain`).
    """
    folder = model_folder(folder)
    for word in overrides or []:
        if word.partition("=")[0] in OWN_START:
            raise ValueError(f"{word}: a trained model brings its own detector and weights; leave this setting out.")
    config = _without_start(saved_settings(folder, overrides), folder, overrides or [])
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    load_strictly(model.detector, folder / "detector" / "model.safetensors")
    load_class_names(model.detector, folder / "detector")
    load_strictly(model.encoder, folder / "encoder" / "model.safetensors")
    _load_task(model, folder)
    if model.phrase_head is not None:
        load_strictly(model.phrase_head, folder / "phrases" / "model.safetensors")
    return config, model.eval(), tokenizer


def saved_settings(run_dir: Path, overrides: list[str] | None = None) -> RunConfig:
    """The settings that a model was saved with; settings of an earlier version come in today's form.

    Raises:
        FileNotFoundError: no model there.
        ValueError: settings that refer to something outside of their file.
    """
    path = model_folder(run_dir) / "config.yaml"
    check_plain(path)
    if saved_version(path) == VERSION:
        return load_config(path, overrides)
    return load_config(path, overrides, upgrade=_upgrade)


def _upgrade(content: dict[str, Any]) -> None:
    """The settings of an earlier version in today's form, in place."""
    if "task" in content and "data" in content:
        resize = content["data"].get("resize") or {}
        if resize.get("rounding", "detectron2") != "detectron2":  # the other one had another name
            resize["rounding"] = "truncate"
        task_class(content["task"]["name"]).upgrade(content["task"].setdefault("config", {}), content["data"])


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
            raise FileNotFoundError(
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
        phrases=dataclasses.replace(config.phrases, weights=None),
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
    """Write a checkpoint folder and remove all but the `keep` newest; called on every process.

    Args:
        position: `step` and whatever else of the run's position JSON can hold; `load_state` returns it.
    """
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step.json").unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder / "state"))
    if accelerator.is_main_process:
        save_model(folder / "model", config, model, tokenizer)
        write_json(folder / "step.json", {**position, "processes": accelerator.num_processes})
        for old in complete_checkpoints(folder.parent.parent)[:-keep]:
            (old / "step.json").unlink()
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """Continue from a checkpoint folder; returns the position that was saved with it.

    The optimiser keeps the options (rates, decay, ...) of the current settings, which it was built with.

    Raises:
        ValueError: a file of the checkpoint is damaged, does not fit the model or tries to run code.
    """
    state = folder / "state"
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        # Accelerate silently goes on without random states that it cannot read
        random_states = load_without_code(state / f"random_states_{accelerator.process_index}.pkl")
        accelerator.load_state(str(state))
        if not torch.equal(torch.get_rng_state(), random_states["torch_manual_seed"]):
            raise ValueError("the random states are damaged")
        position = read_position(folder)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{state}: optimizer.bin or a random_states file is damaged or tries to run code; use another checkpoint."
        ) from error
    except (RuntimeError, ValueError, LookupError, TypeError, OSError, EOFError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"Cannot continue from {folder} ({reason}); use another checkpoint.") from error
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return position


def check_lists(folder: Path, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that wordpieces and answers, which a resumed run reads or builds again, have kept their numbers.

    Raises:
        ValueError: a list differs from the list in the checkpoint folder, perhaps only in its order.
    """
    check_vocabulary(folder / "model" / "encoder", tokenizer)
    check_answers(folder / "model" / "task", model.task)


def read_position(folder: Path) -> dict[str, Any]:
    """Content of a checkpoint's step.json."""
    return json.loads((folder / "step.json").read_text(encoding="utf-8"))


def find_resumable(output: Path, config: RunConfig, num_processes: int) -> Path | None:
    """The newest complete checkpoint of a run directory, or None if the run never saved one.

    Settings may differ from the settings of the checkpoint where they leave the architecture; they are logged.

    Raises:
        ValueError: the checkpoint was made by another architecture, or by another number of processes.
        FileNotFoundError: the run directory does not exist.
    """
    if not output.is_dir():
        raise FileNotFoundError(f"Cannot resume: run directory {output} does not exist; start without --resume.")
    complete = complete_checkpoints(output)
    if not complete:
        return None
    folder = complete[-1]
    if saved_version(folder / "model" / "config.yaml") != VERSION:
        raise ValueError(
            f"Cannot resume from {folder}: it was saved by an earlier version of this project; evaluate it, start a "
            f"new run from it with encoder.weights={output}, or choose another `output`."
        )
    check_plain(folder / "model" / "config.yaml")
    written = load_config(folder / "model" / "config.yaml")
    as_saved = dataclasses.replace(written.detector, config=str(folder / "model/detector/config.yaml"), overrides={})
    saved = dataclasses.replace(written, detector=as_saved)
    changed = differences(_architecture(saved), _architecture(config))
    if changed:
        raise ValueError(
            f"Cannot resume from {folder}: its architecture differs from the settings ({'; '.join(changed[:3])}); "
            "resume with the settings in its model/config.yaml, or choose another `output`."
        )
    processes = read_position(folder)["processes"]
    if processes != num_processes:
        raise ValueError(
            f"Cannot resume from {folder}: it was saved by {processes} processes, and this run has {num_processes}; "
            f"launch it with --num_processes {processes}."
        )
    changed = [line for line in differences(written, config) if not line.startswith("output:")]
    if changed:
        logger.warning("Resuming %s with other settings than before: %s", output, "; ".join(changed))
    return folder


def refuse_to_overwrite(output: Path) -> None:
    """Raises ValueError if the run directory already holds a run, or is no directory."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; choose another `output`, a directory for the run.")
    if complete_checkpoints(output) or (output / "metrics.json").exists():
        raise ValueError(f"{output} already holds a run; continue it with --resume, or choose another `output`.")


def _architecture(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which parameters exist and what they mean."""
    return {
        "detector": yaml.safe_load(read_detector_config(config.detector).to_yaml()),
        "encoder": {"name": config.encoder.name, **config.encoder.config},
        "task": {"name": config.task.name, **config.task.config},
        "phrases": {"layer": config.phrases.layer, "size": config.phrases.size} if config.phrases.weight else None,
    }


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run directory that were written to the end, oldest first."""
    return sorted(path.parent for path in (run_dir / "checkpoints").glob("step_*/step.json"))

"""Checkpoints: the model in `save_pretrained` form, and Accelerate's state to continue exactly.

step_00001000/
  model/          config.yaml, detector/, encoder/, task/, perhaps phrases/, tokenizer/: loads with `load_model`, needs
                  no training code
  state/          weights, optimiser and random states of every process (Accelerate)
  step.json       position in the run
  checksums.json  of all these files; a resumed run passes over checkpoints whose files are not as they were written
  best/           perhaps: the best model when the checkpoint was saved, see `e2e_vl/run/best.py`

A checkpoint is written beside its place and renamed when it is whole. No file of it can run code when it is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import load as load_without_code
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from detector.checkpoint import load_class_names, load_strictly, load_weights, save_settings
from detector.errors import DiskError, MissingFileError, UserError
from detector.io import begin_folder, decode_yaml, finish_folder, part_of, read_json, read_yaml, write_json
from detector.weight_files import read_tensors
from e2e_vl.config import VERSION, RunConfig, differences, load_config, load_overrides, save_config, saved_version
from e2e_vl.data.answer_lists import ANSWERS_FILE, write_answers
from e2e_vl.detector_yaml import read_detector_config
from e2e_vl.io import CHECKSUMS, errors_naming, find_damage, model_folder, write_checksums
from e2e_vl.model import VisionLanguageModel
from e2e_vl.plain_yaml import check_plain
from e2e_vl.run.build import build_model, task_class
from e2e_vl.run.checked_state import check_files, check_optimizer, checked_position, has_random_state
from e2e_vl.run.earlier_rules import rules_of
from e2e_vl.run.failed_step import not_finite
from e2e_vl.run.stopping import all_or_none, is_disk_full, is_lost_process
from e2e_vl.tasks.phrase_head import load_head
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.start import TEACHER, check_answers, check_vocabulary, todays_names

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


logger = logging.getLogger(__name__)

POSITION_FILE = "step.json"


def save_state(
    accelerator: Accelerator,
    folder: Path,
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    *,
    position: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint folder, then remove all but the `keep` newest; called on every process.

    Checkpoints of later steps, which a run passed over or leaves behind, are removed too.

    Args:
        position: `step` and whatever else of the run's position JSON can hold; `load_state` returns it.

    Raises:
        FloatingPointError: weights or moments of the optimiser are NaN or infinite; nothing is written.
        OSError: it could not be written; nothing of it is left, and the earlier checkpoints are as they were.
    """
    run_dir, is_main = folder.parent.parent, accelerator.is_main_process
    try:
        with all_or_none(accelerator):
            if is_main:
                _refuse_nan(model, optimizer, run_dir)
                with _writing(folder):
                    begin_folder(folder)
        with all_or_none(accelerator), _writing(folder):
            accelerator.save_state(str(part_of(folder) / "state"))
        with all_or_none(accelerator):
            if is_main:
                with _writing(folder):
                    _finish(folder, config, model, tokenizer, {**position, "processes": accelerator.num_processes})
                whole = [one for one in complete_checkpoints(run_dir) if one.name <= folder.name]
                for old in set(complete_checkpoints(run_dir)).difference(whole[-keep:]):
                    (old / POSITION_FILE).unlink()
                    shutil.rmtree(old)
    finally:
        if is_main:
            shutil.rmtree(part_of(folder), ignore_errors=True)


def _finish(
    folder: Path, config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase, position: Any
) -> None:
    part = part_of(folder)
    save_model(part / "model", config, model, tokenizer)
    write_json(part / POSITION_FILE, {**position, "checksums": CHECKSUMS})
    write_checksums(part)
    finish_folder(folder)


def _refuse_nan(model: VisionLanguageModel, optimizer: torch.optim.Optimizer, run_dir: Path) -> None:
    moments = {
        f"{name} of parameter {number} in the optimiser": value
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    bad = not_finite({**model.state_dict(), **moments})
    if bad:
        raise FloatingPointError(
            f"{bad[0]} became NaN or infinite, so nothing is saved; lower train.lr, or set train.clip_norm. "
            f"{newest_in_words(run_dir)}"
        )


def newest_in_words(run_dir: Path) -> str:
    """Where a run can go on, as a sentence."""
    complete = complete_checkpoints(run_dir)
    return f"--resume continues from {complete[-1]}." if complete else "There is no checkpoint to go on from."


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Whatever the libraries raise when they cannot write becomes a DiskError with one sentence."""
    try:
        yield
    except Exception as error:  # tokenizers raise nothing more special
        is_about_files = isinstance(error, OSError | RuntimeError | SafetensorError) and not is_lost_process(error)
        if not is_about_files and not is_disk_full(error):
            raise
        reason = "the disk or a quota is full" if is_disk_full(error) else " ".join(str(error).split())[:200]
        raise DiskError(
            f"{folder} cannot be written ({reason}); nothing of it is left. Make room, or repair the disk. "
            f"{newest_in_words(folder.parent.parent)}"
        ) from error


_UNUSABLE = (  # what libraries raise for a state that is damaged or of another model
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError),
    *(ValueError, SafetensorError),
)


def load_state(accelerator: Accelerator, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """Continue from a checkpoint folder; returns the position that was saved with it.

    The optimiser keeps the options (rates, decay, ...) of the current settings, which it was built with.

    Raises:
        UserError: a file of the checkpoint is damaged, does not fit the model or tries to run code; or weights or
            moments are NaN or infinite.
    """
    state = folder / "state"
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        position = read_position(folder)
        check_files(state)
        # Accelerate silently goes on without random states that it cannot read
        random_states = load_without_code(state / f"random_states_{accelerator.process_index}.pkl")
        accelerator.load_state(str(state))
        if not torch.equal(torch.get_rng_state(), random_states["torch_manual_seed"]):
            raise UserError("the random states are damaged")
        if not has_random_state(accelerator.device, random_states):
            logger.warning(
                "%s has no random state of %s, since other devices saved it; dropout and sampled regions will not be "
                "the same as without the stop.",
                *(folder, accelerator.device),
            )
        # gradients that overflowed in every step so far are a reason not to have moments
        check_optimizer(optimizer, has_stepped=position["step"] > 0 and accelerator.scaler is None)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{state}: optimizer.bin or a random_states file is damaged or tries to run code; use another checkpoint."
        ) from error
    except _UNUSABLE as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"Cannot continue from {folder} ({reason}); use another checkpoint.") from error
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return position


def check_lists(folder: Path, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that wordpieces and answers, which a resumed run reads or builds again, have kept their numbers.

    Raises:
        UserError: a list differs from the list in the checkpoint folder, perhaps only in its order.
    """
    check_vocabulary(folder / "model" / "encoder", tokenizer)
    check_answers(folder / "model" / "task", model.task)


def read_position(folder: Path) -> dict[str, Any]:
    """Content of a checkpoint's step.json.

    Raises:
        UserError: it is damaged.
    """
    return checked_position(read_json(folder / POSITION_FILE, dict[str, Any]), folder / POSITION_FILE)


def newest_whole(output: Path) -> Path | None:
    """The newest checkpoint of a run directory whose files are as they were written, or None if there never was one.

    Damaged ones are passed over with a warning.

    Raises:
        UserError: all are damaged.
    """
    damaged: list[str] = []
    for folder in reversed(complete_checkpoints(output)):
        damage = _damage(folder)
        if damage is None:
            if damaged:
                logger.warning("%s; the run goes on from %s, the newest whole checkpoint.", "; ".join(damaged), folder)
            return folder
        damaged.append(f"{folder} is damaged ({damage})")
    if damaged:
        raise UserError(
            f"Cannot resume: {'; '.join(damaged)}; copy another checkpoint there, or choose another `output`."
        )
    return None


def _damage(folder: Path) -> str | None:
    try:
        has_checksums = (folder / CHECKSUMS).exists() or "checksums" in read_position(folder)
    except (OSError, ValueError):
        return f"its {POSITION_FILE} cannot be read"
    return find_damage(folder) if has_checksums else None  # earlier versions wrote none


def find_resumable(output: Path, config: RunConfig, num_processes: int) -> Path | None:
    """The newest whole checkpoint of a run directory, or None if the run never saved one.

    Settings may differ from the settings of the checkpoint where they leave the architecture; they are logged.

    Raises:
        UserError: the checkpoint was made by another architecture, or by another number of processes; or all
            checkpoints are damaged.
        FileNotFoundError: the run directory does not exist.
    """
    if not output.is_dir():
        raise MissingFileError(f"Cannot resume: run directory {output} does not exist; start without --resume.")
    folder = newest_whole(output)
    if folder is None:
        return None
    if saved_version(folder / "model" / "config.yaml") != VERSION:
        raise UserError(
            f"Cannot resume from {folder}: it was saved by an earlier version of this project; evaluate it, start a "
            f"new run from it with encoder.weights={output}, or choose another `output`."
        )
    check_plain(folder / "model" / "config.yaml")
    path = folder / "model" / "config.yaml"
    written = load_config(path, upgrade=rules_of(path))
    as_saved = dataclasses.replace(written.detector, config=str(folder / "model/detector/config.yaml"), overrides={})
    saved = dataclasses.replace(written, detector=as_saved)
    changed = differences(_architecture(saved), _architecture(config))
    if changed:
        raise UserError(
            f"Cannot resume from {folder}: its architecture differs from the settings ({'; '.join(changed[:3])}); "
            "resume with the settings in its model/config.yaml, or choose another `output`."
        )
    processes = read_position(folder)["processes"]
    if processes != num_processes:
        raise UserError(
            f"Cannot resume from {folder}: it was saved by {processes} processes, and this run has {num_processes}; "
            f"launch it with --num_processes {processes}."
        )
    changed = [line for line in differences(written, config) if not line.startswith("output:")]
    if changed:
        logger.warning("Resuming %s with other settings than before: %s", output, "; ".join(changed))
    return folder


def refuse_to_overwrite(output: Path) -> None:
    """Raises ValueError if the run directory already holds a run, or anything that is no run, or is no directory.

    A run that was stopped before its first checkpoint may begin again.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another `output`, a directory for the run.")
    if complete_checkpoints(output) or (output / "metrics.json").exists():
        raise UserError(f"{output} already holds a run; continue it with --resume, or choose another `output`.")
    if output.exists() and not is_run(output) and any(not path.name.startswith(".") for path in output.iterdir()):
        raise UserError(
            f"{output} is not empty and holds no run; choose another `output`, so that nothing in it is overwritten."
        )


def is_run(folder: Path) -> bool:
    """Whether a folder has the complete settings that a run writes first; what people write has fewer keys."""
    try:
        content = read_yaml(folder / "config.yaml")
    except (OSError, UserError):
        return False
    return (
        isinstance(content, dict)
        and {field.name for field in dataclasses.fields(RunConfig)} - {"revision"} <= content.keys()
    )


def _architecture(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which parameters exist and what they mean."""
    return {
        "detector": decode_yaml(read_detector_config(config.detector).to_yaml(), config.detector.config),
        "encoder": {"name": config.encoder.name, **config.encoder.config},
        "task": {"name": config.task.name, **config.task.config},
        "phrases": {"layer": config.phrases.layer, "size": config.phrases.size} if config.phrases.weight else None,
    }


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run directory that were written to the end, oldest first."""
    return sorted(path.parent for path in (run_dir / "checkpoints").glob(f"step_*/{POSITION_FILE}"))


def finished_metrics(run_dir: Path, step: int, *, is_over: bool, patience: int | None) -> dict[str, Any] | None:
    """`metrics.json` of a run that has ended after this step and written everything; None if something is left to do.

    Args:
        is_over: no step is left.
        patience: of the settings; a run that stopped early for as many evaluations has ended, too.
    """
    try:
        metrics = read_json(run_dir / "metrics.json", dict[str, Any])
    except (FileNotFoundError, ValueError):
        return None
    has_waited = patience is not None and metrics.get("stopped_early", 0) >= patience
    is_whole = metrics.get("steps") == step and (run_dir / "report.html").is_file()
    return metrics if is_whole and (is_over or has_waited) else None

"""Checkpoints: the model in `save_pretrained` form, and Accelerate's state to continue exactly.

step_00001000/
  model/       config.yaml, detector/, encoder/, task/, tokenizer/: loads with `load_model`, needs no training code
  state/       optimiser, schedule and random states of every process (Accelerate)
  step.json    position in the run; written last, so a folder without it was cut off while saving
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from e2e_vl.config import RunConfig, differences, load_config, save_config
from e2e_vl.engine.build import build_model, detector_yaml
from e2e_vl.engine.logging import write_json
from e2e_vl.engine.weights import load_strictly
from e2e_vl.model import VisionLanguageModel
from e2e_vl.text import load_tokenizer


def save_model(folder: Path, config: RunConfig, model: VisionLanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write settings, weights (safetensors) and tokenizer; the encoder folder is a transformers checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder / "config.yaml")
    model.encoder.save_pretrained(folder / "encoder")
    for name in ("detector", "task"):
        part = getattr(model, name)
        (folder / name).mkdir(exist_ok=True)
        tensors = {key: value.detach().contiguous().cpu() for key, value in part.state_dict().items()}
        save_file(tensors, folder / name / "model.safetensors")
    (folder / "detector" / "config.yaml").write_text(model.detector.config.to_yaml(), encoding="utf-8")
    tokenizer.save_pretrained(folder / "tokenizer")


def load_model(
    folder: Path, *, overrides: list[str] | None = None
) -> tuple[RunConfig, VisionLanguageModel, PreTrainedTokenizerBase]:
    """Read what `save_model` wrote: the folder itself, or a run directory that holds it as `model/`.

    Args:
        overrides: `key=value` settings that change the saved ones, such as `data.root=DIR`.

    Raises:
        FileNotFoundError: no model there.
        ValueError: weights that do not fit the settings beside them.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file() or not (folder / "encoder").is_dir():
        if not (folder / "model" / "config.yaml").is_file():
            raise FileNotFoundError(
                f"{folder} holds no trained model (no model/config.yaml); give a run directory of tools/train.py."
            )
        folder = folder / "model"
    config = load_config(folder / "config.yaml", overrides)
    config.detector.config = str(folder / "detector" / "config.yaml")
    config.detector.overrides = {}
    config.detector.weights = config.encoder.weights = None
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    model = build_model(config, vocab_size=len(tokenizer))
    for name in ("detector", "task"):
        load_strictly(getattr(model, name), folder / name / "model.safetensors")
    load_strictly(model.encoder, folder / "encoder" / "model.safetensors")
    return config, model.eval(), tokenizer


def save_state(
    accelerator: Accelerator,
    folder: Path,
    config: RunConfig,
    model: VisionLanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    keep: int,
) -> None:
    """Write a checkpoint folder and remove all but the `keep` newest; called on every process."""
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step.json").unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder / "state"))
    if accelerator.is_main_process:
        save_model(folder / "model", config, model, tokenizer)
        write_json(folder / "step.json", {"step": step, "processes": accelerator.num_processes})
        for old in _complete(folder.parent)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, folder: Path) -> int:
    """Continue from a checkpoint folder; returns its step."""
    accelerator.load_state(str(folder / "state"))
    return json.loads((folder / "step.json").read_text(encoding="utf-8"))["step"]


def find_resumable(output: Path, config: RunConfig) -> Path | None:
    """The newest complete checkpoint of a run directory, or None if the run never saved one.

    Raises:
        ValueError: the checkpoint was made by another architecture, or by another number of processes.
        FileNotFoundError: the run directory does not exist.
    """
    if not output.is_dir():
        raise FileNotFoundError(f"Cannot resume: run directory {output} does not exist; start without --resume.")
    complete = _complete(output / "checkpoints")
    if not complete:
        return None
    folder = complete[-1]
    saved = load_config(folder / "model" / "config.yaml")
    saved.detector.config, saved.detector.overrides = str(folder / "model" / "detector" / "config.yaml"), {}
    changed = differences(_architecture(saved), _architecture(config))
    if changed:
        raise ValueError(
            f"Cannot resume from {folder}: its architecture differs from the settings ({'; '.join(changed[:3])}); "
            "resume with the settings in its model/config.yaml, or choose another `output`."
        )
    return folder


def refuse_to_overwrite(output: Path) -> None:
    """Raises ValueError if the run directory already holds a run."""
    if _complete(output / "checkpoints"):
        raise ValueError(f"{output} already holds a run; continue it with --resume, or choose another `output`.")


def _architecture(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which parameters exist and what they mean."""
    return {
        "detector": detector_yaml(config),
        "encoder": {"name": config.encoder.name, **config.encoder.config},
        "task": {"name": config.task.name, **config.task.config},
    }


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders that were written to the end, oldest first."""
    return sorted(path.parent for path in folder.glob("step_*/step.json"))

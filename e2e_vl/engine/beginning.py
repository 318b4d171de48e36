"""How the processes of a run begin together, and take its run directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from detector.errors import UserError
from e2e_vl.config import RunConfig, save_config
from e2e_vl.data.loading.grouping import GroupedBatchSampler
from e2e_vl.engine import checkpoints
from e2e_vl.engine.preflight import Preflight, look_ahead
from e2e_vl.engine.run import Run
from e2e_vl.engine.run_lock import RunLock
from e2e_vl.whole_files import remove_leftovers


def look_ahead_together(
    config: RunConfig, accelerator: Accelerator, held: contextlib.ExitStack, *, resume: bool
) -> Preflight:
    """`look_ahead` on all processes, of which the main one raises what any of them found; the others leave silently.

    Args:
        held: holds the run directory from here on. Nothing is written into it before the last check.
    """
    known, findings, output, is_main = None, None, Path(config.output), accelerator.is_main_process
    with accelerator.main_process_first():
        try:
            if is_main and output.is_dir():
                held.enter_context(RunLock(output))
            known = look_ahead(config, accelerator.num_processes, resume=resume, looks_at_output=is_main)
            if is_main:
                _take_output(known, held)
        except (ValueError, OSError) as error:
            findings = str(error)
    found = next(filter(None, gather_object([findings])), None)
    if found is None:
        known.resume_from = gather_object([known.resume_from])[0]
        return known
    if is_main:
        raise UserError(found)
    raise SystemExit(2)


def _take_output(known: Preflight, held: contextlib.ExitStack) -> None:
    """Make the run directory and write the settings of a new run, by which it is known as one."""
    output = Path(known.config.output)
    if not output.is_dir():
        held.enter_context(RunLock(output))
        checkpoints.refuse_to_overwrite(output)  # another run may have been quicker
    for folder in (output, output / "checkpoints"):
        remove_leftovers(folder)
    if known.resume_from is None:
        save_config(known.config, output / "config.yaml")


def build_sampler(config: RunConfig, run: Run, accelerator: Accelerator) -> GroupedBatchSampler:
    """Deals the images of the training split to micro-batches and processes."""
    settings = config.train
    return GroupedBatchSampler(
        run.train_data.groups,
        images_per_batch=settings.images_per_batch // settings.accumulate,
        accumulate=settings.accumulate,
        texts_per_image=config.data.texts_per_image,
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )

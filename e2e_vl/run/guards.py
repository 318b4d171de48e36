"""Guards of a training run: one run per folder, missing images, signals, and NaN."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from filelock import FileLock, Timeout

from detector.errors import MissingFileError, StoppedRunError, UserError
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.batching import ExampleDataset
from e2e_vl.run.build import Run
from e2e_vl.structures import Batch

LOCK_FILE = ".lock"  # of a run directory


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Make a run directory and lock it for this process; the kernel ends the lock however the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK_FILE, blocking=False):
            yield
    except Timeout:
        raise UserError(f"{folder} is in use by another training; stop it, or choose another `output`.") from None


def check_images(config: RunConfig, run: Run) -> None:
    """Look for `data.check_images` image files of each split, evenly spread, before hours of training.

    The first missing one is named in the error, and the others are counted.
    """
    splits: dict[str, ExampleDataset] = {split: one for (split, _), one in run.eval_data.items()}
    splits[config.data.train_split] = run.train_data
    if config.data.skip_broken or BoxSource(config.data.boxes.train) is BoxSource.PRECOMPUTED:
        return
    for split, examples in splits.items():
        groups, limit = examples.groups, config.data.check_images
        number = len(groups) if limit is None else min(limit, len(groups))
        missing: list[str] = []
        for step in range(number):
            texts: Sequence[int] = groups[step * len(groups) // number]
            for image in examples.dataset.sample(texts[:1]).images if len(texts) else ():
                try:
                    place = image.locate()
                except FileNotFoundError as error:  # of an archive
                    missing.append(str(error))
                    continue
                if isinstance(place, Path) and not place.is_file():
                    missing.append(f"{place}: the file of image {image.id} is missing; check the image folder's path")
        if missing:
            more = f" ({len(missing)} of {number} images of the split {split} are missing)" if len(missing) > 1 else ""
            raise MissingFileError(f"{missing[0]}{more}")


# Signals that ask a run to stop


class StopSignals:
    """While it is entered, SIGTERM, Ctrl-C and SIGHUP ask the run to save a checkpoint and to end.

    Attributes:
        number: of the signal that came; None: none did.
        at_once: nothing would be lost, so a signal ends the run where it is.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    PATIENCE = 2.0  # seconds; launchers pass Ctrl-C on, so that it comes twice at nearly the same time

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_once = False
        self._came_at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in self.SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or in the background
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        comes_again = self.number is not None and time.monotonic() - self._came_at > self.PATIENCE
        if self.at_once or comes_again:
            raise stopped_by(number, "--resume continues from the newest checkpoint.")
        if self.number is None:
            self.number, self._came_at = number, time.monotonic()
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nsaving a checkpoint after this step; Ctrl-C again stops at once\n")


def stopped_by(number: int, advice: str) -> StoppedRunError:
    """What ends a run that a signal stopped; its exit status is 128 + the signal, as shells have it."""
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes one does
    return StoppedRunError(f"stopped by {signal.Signals(number).name}. {advice}" if speaks else "", 128 + number)


# Numbers that are NaN or infinite


class FiniteCheck:
    """Checks the losses and the gradient norm of each step before the update.

    In fp16 gradients may overflow now and then: the scaler skips such a step and lowers its scale.

    Args:
        scaled: the gradients are those of a scaled loss.
    """

    MAX_OVERFLOWS = 50  # in a row; the scale of fp16 is below any use then
    SHOWN_IMAGES = 4

    def __init__(self, *, scaled: bool) -> None:
        self.scaled = scaled
        self.overflows = 0  # in a row

    def __call__(self, values: Mapping[str, float], step: int, batches: Sequence[Batch]) -> bool:
        """Whether the step is made; False: its gradients overflowed in fp16.

        Args:
            values: the losses by name, and `grad_norm`.
            batches: of this process.

        Raises:
            FloatingPointError: a value is NaN or infinite.
        """
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        is_overflow = self.scaled and bad == ["grad_norm"]
        self.overflows = self.overflows + 1 if is_overflow else 0
        if not bad or (is_overflow and self.overflows < self.MAX_OVERFLOWS):
            return not bad
        losses = [name for name in bad if name not in ("loss", "grad_norm")]
        images = [name for batch in batches for name in batch.images.names]
        more = ", ..." if len(images) > self.SHOWN_IMAGES else ""
        raise FloatingPointError(
            f"{', '.join(losses) or bad[0]} became NaN or infinite in step {step} (images "
            f"{', '.join(images[: self.SHOWN_IMAGES])}{more}), and the update was not made; lower train.lr, set "
            "train.clip_norm, or look at the annotations of these images. --resume continues from the newest "
            "checkpoint."
        )

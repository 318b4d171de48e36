"""Safety checks of a training run: the lock of its folder, missing images, signals, NaN and infinite values."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from filelock import FileLock, Timeout

from detector.errors import MissingFileError, UserError
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.data.batching import EncodedDataset
from e2e_vl.io import LOCK_FILE
from e2e_vl.run.build import Run
from e2e_vl.structures import Batch
from e2e_vl.terminal import HANG_UP, LAUNCHED, PATIENCE, handling_signals, make_stopped_error

logger = logging.getLogger(__name__)

# environment variables that `accelerate launch`, `torchrun` and `--num-processes` set
OF_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID", LAUNCHED)


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Create a run directory and lock it; the lock ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK_FILE, blocking=False):
            yield
    except Timeout:
        raise UserError(f"{folder} is in use by another training run; stop it, or choose another `output`.") from None


def check_images(config: RunConfig, run: Run) -> None:
    """Check that `data.check_images` image files of each split, evenly spaced, exist.

    The error names the first missing file and counts the others.
    """
    splits: dict[str, EncodedDataset] = {split: examples for (split, _), examples in run.eval_data.items()}
    splits[config.data.train_split] = run.train_data
    if config.data.skip_broken or BoxSource(config.data.boxes.train) is BoxSource.PRECOMPUTED:
        return
    for split, examples in splits.items():
        groups = examples.groups
        number = len(groups)
        if config.data.check_images is not None:
            number = min(number, config.data.check_images)
        missing: list[str] = []
        for step in range(number):
            texts: Sequence[int] = groups[step * len(groups) // number]
            if len(texts) == 0:
                continue
            for image in examples.dataset.sample(texts[:1]).images:
                try:
                    file = image.locate()
                except FileNotFoundError as error:  # from an archive
                    missing.append(str(error))
                    continue
                if isinstance(file, Path) and not file.is_file():
                    missing.append(f"{file}: the file of image {image.id} is missing; check the image folder's path")
        if missing:
            message = missing[0]
            if len(missing) > 1:
                message += f" ({len(missing)} of {number} images of the split {split} are missing)"
            raise MissingFileError(message)


def warn_of_shared_images(config: RunConfig, run: Run) -> None:
    """Log one warning if images of the evaluation splits are also trained on."""
    trained = set(run.train_data.dataset.image_locations())
    sentences: list[str] = []
    datasets = {split: examples.dataset for (split, _), examples in run.eval_data.items()}  # whatever the box source
    for split, dataset in datasets.items():
        images = set(dataset.image_locations())
        shared = images & trained
        if split == config.data.train_split:
            sentences.append(f"{split} is the training split")
        elif shared:
            example = min(name for _, name in shared)
            sentences.append(f"{len(shared):,} of {len(images):,} images of {split} are trained on, such as {example}")
    if sentences:
        logger.warning("Metrics do not show how well the model does on new images: %s.", "; ".join(sentences))


# Signals


class StopSignals:
    """A context in which SIGTERM, SIGINT (Ctrl-C) and SIGHUP request a checkpoint and the end of the run.

    A second signal of the same kind, after PATIENCE, ends the run at once. One of another kind does not: after Ctrl-C
    the launcher dies first, and the terminal then sends SIGHUP.

    Attributes:
        number: number of the first signal; None: no signal yet.
        at_once: a signal ends the run at once, because a checkpoint of this step exists.
    """

    PATIENCE = PATIENCE  # seconds

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_once = False
        self._arrivals: dict[int, float] = {}  # when each kind of signal came first
        self._context = contextlib.ExitStack()
        self._launcher: int | None = None
        if any(name in os.environ for name in OF_LAUNCHERS):
            self._launcher = os.getppid()  # it has to live as long as this process

    def __enter__(self) -> Self:
        self._context.enter_context(handling_signals(self._handle))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._context.close()

    def received(self) -> int | None:
        """Return the number of the first signal, or None; SIGHUP if the launcher died without one (`kill LAUNCHER`)."""
        if self.number is None and self._launcher is not None and os.getppid() != self._launcher:
            self.number = HANG_UP
        return self.number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_repeated = now - self._arrivals.setdefault(number, now) > self.PATIENCE
        is_first = self.number is None
        if is_first:
            self.number = number  # first of all: Python drops errors that are raised in finalisers
        if self.at_once or is_repeated:
            raise make_stopped_error(number, "--resume continues from the newest checkpoint.")
        if is_first and number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # the terminal may have gone
                os.write(2, b"\nsaving a checkpoint after this step; Ctrl-C again stops at once\n")


# NaN and infinite values


class FiniteCheck:
    """Checks the losses and the gradient norm of each step before the update.

    In fp16, gradients may overflow occasionally: the scaler then skips the step and lowers its scale. `scaled`: whether
    a gradient scaler is in use.
    """

    MAX_OVERFLOWS = 50  # in a row; by then the loss scale is uselessly small
    SHOWN_IMAGES = 4

    def __init__(self, *, scaled: bool) -> None:
        self.scaled = scaled
        self.overflows = 0  # in a row

    def __call__(self, values: Mapping[str, float], step: int, batches: Sequence[Batch]) -> bool:
        """Check the values of a step, and count the overflows in a row.

        Returns:
            Whether all values are finite; False: the gradients overflowed in fp16, so the step is skipped.

        Raises:
            FloatingPointError: a value is NaN or infinite.
        """
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        is_overflow = self.scaled and bad == ["grad_norm"]
        if is_overflow:
            self.overflows += 1
        else:
            self.overflows = 0
        if not bad:
            return True
        if is_overflow and self.overflows < self.MAX_OVERFLOWS:
            return False
        losses = [name for name in bad if name not in ("loss", "grad_norm")]
        images: list[str] = []
        for batch in batches:
            images += batch.images.names
        more = ", ..." if len(images) > self.SHOWN_IMAGES else ""
        raise FloatingPointError(
            f"{', '.join(losses) or bad[0]} became NaN or infinite in step {step} (images "
            f"{', '.join(images[: self.SHOWN_IMAGES])}{more}), and the weights were not updated; lower train.lr, set "
            "train.max_grad_norm, or check the annotations of these images. --resume continues from the newest "
            "checkpoint."
        )

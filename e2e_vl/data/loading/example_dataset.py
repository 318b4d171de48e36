"""From the facts of a data set to examples: read, load, word, in this order and for every data set alike.

data set --> Sample --> image loader --> ImageExample (pixels, moved boxes) --+--> Example
                |                                                             |
                +--> the task's wording (wordpieces, targets, records) -------+
"""

from __future__ import annotations

import functools
import itertools
import logging

from torch.utils.data import Dataset

from detector.errors import MissingFileError, UserError
from e2e_vl.data.base import VLDataset
from e2e_vl.data.images.loader import ImageLoader
from e2e_vl.data.loading.requests import Request, random_generator
from e2e_vl.examples import Example
from e2e_vl.samples import BrokenImageError
from e2e_vl.wording import Draw, Wording

logger = logging.getLogger(__name__)

_BROKEN_IN_A_ROW = 20  # after this many unreadable images one after the other, the data are wrong as a whole
_HINT = "(Training can go on without it: data.skip_broken=true takes the next image and logs it.)"


class ExampleDataset(Dataset):
    """Answers requests for one image with some of its texts.

    All texts of one request share one image, so also its mirroring and its size.

    Args:
        dataset: states the facts.
        loader: makes pixels and moves boxes.
        wording: puts the texts into wordpieces.
        seed: all randomness depends on (seed, epoch, text) only.
        skip_broken: take the next image in place of one that is missing or cannot be read, and log it.

    Attributes:
        groups: text indices of each image.
        broken: groups whose images were replaced by others in this process.
    """

    def __init__(
        self, dataset: VLDataset, loader: ImageLoader, wording: Wording, *, seed: int = 0, skip_broken: bool = False
    ) -> None:
        self.dataset = dataset
        self.loader = loader
        self.wording = wording
        self.seed = seed
        self.skip_broken = skip_broken
        self.groups = dataset.groups
        self.broken: set[int] = set()

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.dataset)

    def __getitem__(self, request: Request) -> Example:
        """Load the request's image once, with all its texts.

        Raises:
            FileNotFoundError: an image file, or a file about it, is missing; names the image and the path.
            ValueError: a file that cannot be read, files that contradict each other, or a box outside its image.
        """
        group, texts = request.group, request.texts
        for _ in range(_BROKEN_IN_A_ROW):
            try:
                return self.read(request, texts)
            except BrokenImageError as error:
                if not self.skip_broken:
                    raise _as_reader_error(error) from error.__cause__
                last = self.dataset.sample(texts).images[0].id
                group, texts = self._next(group, len(texts), error)
        raise UserError(
            f"{_BROKEN_IN_A_ROW} images in a row cannot be read, the last is image {last}; check where the data are"
        )

    def read(self, request: Request, texts: tuple[int, ...] | None = None) -> Example:
        """Load an image with all texts of the request, or with `texts`, but with the request's randomness.

        Raises:
            BrokenImageError: the image is missing or cannot be read; its cause says which and why.
            ValueError: files that contradict each other, or a box outside its image.
        """
        draw: Draw = functools.partial(random_generator, self.seed, request.epoch)
        augmentation = self.loader.draw_augmentation(draw(request.texts[0]))
        sample = self.dataset.sample(request.texts if texts is None else texts)
        images = [self.loader.load(image, augmentation) for image in sample.images]
        return Example(images, list(self.wording(sample, images, draw)))

    def image_ids_of(self, texts: tuple[int, ...]) -> tuple[str, ...]:
        """Ids of the images that some texts of one group are about."""
        return tuple(image.id for image in self.dataset.sample(texts).images)

    def _next(self, group: int, num_texts: int, error: BrokenImageError) -> tuple[int, tuple[int, ...]]:
        """The next image with texts, and its first ones, in place of an image that cannot be read."""
        self.broken.add(group)
        others = itertools.chain(range(group + 1, len(self.groups)), range(group))
        group = next((other for other in others if len(self.groups[other])), None)
        if group is None:
            raise error.__cause__
        logger.warning(
            "%s The next image takes its place (%d unreadable images so far in this process).",
            *(error.__cause__, len(self.broken)),
        )
        return group, tuple(self.groups[group][:num_texts])


def _as_reader_error(error: BrokenImageError) -> Exception:
    """What is raised where nothing may be skipped."""
    kind = MissingFileError if isinstance(error.__cause__, FileNotFoundError) else UserError
    return kind(f"{error.__cause__} {_HINT}")

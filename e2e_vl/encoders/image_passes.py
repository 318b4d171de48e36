"""Each image of a text in a pass of its own, for encoders that read one image at a time.

Shape legend
    M  texts in the batch
    I  images that one text looks at, at most
    L  wordpieces of the longest text
    R  regions (candidate boxes) of one image; where padded: of the text or image with the most
    E  hidden size of the encoder
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from detector.errors import UserError
from e2e_vl.structures import TextBatch, TextRegions, take_along


@dataclasses.dataclass(frozen=True)
class ImagePasses:
    """Which regions belong to which image of a text: the I images of M texts are M x I passes of the encoder."""

    row: Int64[Tensor, "M I own"]  # region of the text that is shown at a place of the pass
    attend: Bool[Tensor, "M I own"]  # places with a region
    slot: Int64[Tensor, "M R"]  # image of a region; I at padding
    place: Int64[Tensor, "M R"]  # of a region in the pass of its image; any valid one for padding

    @classmethod
    def of(cls, regions: TextRegions, count: int) -> ImagePasses:
        """The passes of texts with room for `count` images. Raises ValueError if a text looks at more."""
        attend, slot = regions.attend, regions.image_slot.masked_fill(~regions.attend, count)
        if count == 1:
            row = torch.arange(attend.shape[1], device=attend.device).expand_as(attend)
            return cls(row[:, None], attend[:, None], slot, row)
        if int(regions.image_slot.max()) >= count:
            raise UserError(
                f"A text looks at {int(regions.image_slot.max()) + 1} images, but encoder.config.image_slots is "
                f"{count}; make them agree."
            )
        is_own = slot[:, None] == torch.arange(count, device=slot.device)[:, None]  # [M, I, R]
        own = max(int(is_own.sum(dim=2).max()), 1)
        row = (~is_own).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :own]
        place = (is_own.cumsum(dim=2) - 1).gather(1, slot.clamp(max=count - 1)[:, None])[:, 0].clamp(0, own - 1)
        return cls(row, is_own.gather(2, row), slot, place)

    def split(self, values: Shaped[Tensor, "M R width"]) -> Shaped[Tensor, "passes own width"]:
        """Regions of texts -> regions of passes; meaningless at padding."""
        rows = self.row.flatten(1)[..., None]
        return take_along(values, rows, dim=1).unflatten(1, self.row.shape[1:]).flatten(0, 1)

    def join(self, states: Float[Tensor, "passes own E"]) -> Float[Tensor, "M R E"]:
        """Regions of passes -> regions of texts, zero at padding."""
        count, own = self.row.shape[1:]
        places = self.slot.clamp(max=count - 1) * own + self.place
        states = states.unflatten(0, (-1, count)).flatten(1, 2)
        return take_along(states, places[..., None], dim=1) * (self.slot < count)[..., None]

    def repeat(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "passes ..."]:
        """Values of texts, once per pass."""
        return values.repeat_interleave(self.row.shape[1], dim=0)


class AttentionMaps:
    """Collects the maps of each step over the slots [words | regions] of M texts, L + R of them."""

    def __init__(self, texts: TextBatch, passes: ImagePasses):
        self.texts, self.passes = texts, passes
        self.found: list[Float[Tensor, "M heads slots slots"]] = []

    def add_words(self, among_words: Float[Tensor, "M heads L L"]) -> None:
        """A step of words alone, before they read images."""
        rest = self.passes.slot.shape[1]
        attend = self.texts.attend
        is_pair = attend[:, None, :, None] & attend[:, None, None, :]
        self.found.append(F.pad(among_words * is_pair, (0, rest, 0, rest)))

    def add_regions(self, among_regions: Float[Tensor, "passes heads own own"]) -> None:
        """A step of regions alone; one map, in which those of different images do not see each other."""
        length = self.texts.attend.shape[1]
        self.found.append(torch.stack(self._of_images(F.pad(among_regions, (length, 0, length, 0)))).sum(dim=0))

    def add_cross(
        self,
        to_regions: Float[Tensor, "passes heads L own"],
        to_words: Float[Tensor, "passes heads own L"],
        among_words: Float[Tensor, "passes heads L L"],
        among_regions: Float[Tensor, "passes heads own own"],
    ) -> None:
        """Two steps of words and regions, first from one to the other and then among themselves, image by image."""
        none = torch.zeros_like
        across = _joined(none(among_words), to_regions, to_words, none(among_regions))
        inside = _joined(among_words, none(to_regions), none(to_words), among_regions)
        for steps in zip(self._of_images(across), self._of_images(inside), strict=True):
            self.found += steps

    def _of_images(self, maps: Float[Tensor, "passes heads places places"]) -> list[Float[Tensor, "M heads _ _"]]:
        """Maps over the places [words | regions of the image] -> a map over all slots for each image."""
        attend, (count, _) = self.texts.attend, self.passes.row.shape[1:]
        words = torch.arange(attend.shape[1], device=attend.device).expand_as(attend)
        places = torch.cat([words, attend.shape[1] + self.passes.place], dim=1)
        found = []
        for image, rows in enumerate(maps.unflatten(0, (-1, count)).unbind(dim=1)):
            rows = take_along(take_along(rows, places[:, None, :, None], dim=2), places[:, None, None, :], dim=3)
            is_real = torch.cat([attend, self.passes.slot == image], dim=1)
            found.append(rows * (is_real[:, None, :, None] & is_real[:, None, None, :]))
        return found


def _joined(
    among_words: Float[Tensor, "passes heads L L"],
    to_regions: Float[Tensor, "passes heads L own"],
    to_words: Float[Tensor, "passes heads own L"],
    among_regions: Float[Tensor, "passes heads own own"],
) -> Float[Tensor, "passes heads places places"]:
    """Four blocks as one map."""
    return torch.cat([torch.cat([among_words, to_regions], 3), torch.cat([to_words, among_regions], 3)], dim=2)

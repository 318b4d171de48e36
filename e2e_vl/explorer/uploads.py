"""Photos that visitors give: which are accepted, and what is kept of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from detector.errors import MissingFileError, UserError, in_one_line
from detector.images import ResizeRule, decode_resized
from e2e_vl.explorer.limits import Limits
from e2e_vl.samples import EncodedImage

# About the room on the page, so that labels are not shrunk; not below the size to which `e2e_vl.drawing` enlarges.
SHOWN_SIZE = ResizeRule(600, 640)
FILE_ENDS = (".jpg", ".jpeg", ".png")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # first bytes of JPEG and PNG files


@dataclasses.dataclass(frozen=True, eq=False)
class Photo:
    """A photo that was accepted."""

    file: EncodedImage
    size: tuple[int, int]  # (height, width) of the upright photo
    pixels: np.ndarray  # uint8 [height, width, 3] RGB, at the size at which it is shown

    @property
    def scale(self) -> np.ndarray:
        """Pixels of the photo as it is shown, per pixel of the original: of x and of y."""
        return np.array([self.pixels.shape[1] / self.size[1], self.pixels.shape[0] / self.size[0]])


def read_photo(path: Path, limits: Limits) -> Photo:
    """Accept a file; its format is read from its content, not from its name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is too large, no JPEG or PNG file, damaged, or of too many pixels.
    """
    name = in_one_line(path.name)
    if not path.is_file():  # a pipe would be waited for without end
        raise MissingFileError(f"{name} is no file; drop the photo again.")
    size = path.stat().st_size
    if size > limits.bytes:
        raise UserError(
            f"{name} has {size / 1e6:.1f} MB; the limit is {limits.megabytes:g} MB, so make it smaller first."
        )
    content = path.read_bytes()
    if not content.startswith(_SIGNATURES):
        raise UserError(f"{name} is neither a JPEG nor a PNG file; convert it first.")
    pixels, original = decode_resized(content, name, SHOWN_SIZE, "RGB", limits.pixels)
    return Photo(EncodedImage(content, name), original, pixels)

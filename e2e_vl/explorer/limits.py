"""The largest photo that the explorer accepts; imports nothing slow, so that options are checked at once."""

from __future__ import annotations

import dataclasses
import math

from detector.errors import UserError


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest photo that is accepted.

    Raises:
        ValueError: a limit that is not positive.
    """

    megapixels: float = 40.0  # of the decoded photo, millions of pixels
    megabytes: float = 20.0  # of the file, millions of bytes

    def __post_init__(self) -> None:
        for name in ("megapixels", "megabytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"--max-{name} is {getattr(self, name)}; it must be a positive number.")

    @property
    def bytes(self) -> int:
        return int(self.megabytes * 1e6)

    @property
    def pixels(self) -> int:
        return int(self.megapixels * 1e6)

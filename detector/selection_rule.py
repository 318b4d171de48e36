"""How many of a detector's boxes are kept. (A file of its own, so that settings can be checked without torch.)"""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from detector.errors import UserError

LARGEST = 1e300  # of a number of settings


@dataclass(frozen=True)
class SelectionRule:
    """Keep scores of at least `min_score`, but never fewer than `min_regions` nor more than `max_regions` boxes.

    The defaults are VL-BERT's (section 4.1). Bottom-up attention uses 0.2 with 10 to 100; a fixed number, such as
    LXMERT's 36, is `min_regions == max_regions`.

    Raises:
        ValueError: numbers that contradict each other.
    """

    where = "Selection rule"  # the place of the numbers, for messages; no field
    min_score: float = 0.5
    min_regions: int = 10
    max_regions: int = 100

    def __post_init__(self) -> None:
        given = {"min_score": self.min_score, "min_regions": self.min_regions, "max_regions": self.max_regions}
        for name, value in given.items():
            if not isinstance(value, numbers.Real) or not abs(value) <= LARGEST:
                raise UserError(f"{self.where}: {name} {value!r:.50} must be a finite number.")
        if not 0 <= self.min_regions <= self.max_regions or self.max_regions < 1:
            raise UserError(
                f"{self.where}: min_regions {self.min_regions} and max_regions {self.max_regions} must satisfy "
                "0 <= min_regions <= max_regions and max_regions >= 1."
            )

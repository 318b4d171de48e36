"""The published sizes of splits, by which a file or somebody's results can be told apart.

Sources: the tables of the REFER API and of TensorFlow's catalogue (references and images), and the sums of the
expressions in the released files.
"""

from __future__ import annotations

from typing import NamedTuple


class OfficialSplit(NamedTuple):
    """A released split of referring expressions, or of captions with phrases."""

    dataset: str
    protocol: str  # who made the partition; "" where there is only one
    split: str
    images: int
    objects: int | None  # refs of REFER; None: not counted
    texts: int | None  # expressions; None: not known here

    @property
    def name(self) -> str:
        protocol = f" ({self.protocol})" if self.protocol else ""
        return f"{self.dataset}{protocol} {self.split}"


OFFICIAL_SPLITS = (
    OfficialSplit("RefCOCO", "UNC", "train", 16_994, 42_404, 120_624),
    OfficialSplit("RefCOCO", "UNC", "val", 1_500, 3_811, 10_834),
    OfficialSplit("RefCOCO", "UNC", "testA", 750, 1_975, 5_657),
    OfficialSplit("RefCOCO", "UNC", "testB", 750, 1_810, 5_095),
    OfficialSplit("RefCOCO", "Google", "train", 19_213, 40_000, None),
    OfficialSplit("RefCOCO", "Google", "val", 4_559, 5_000, None),
    OfficialSplit("RefCOCO", "Google", "test", 4_527, 5_000, None),
    OfficialSplit("RefCOCO+", "UNC", "train", 16_992, 42_278, 120_191),
    OfficialSplit("RefCOCO+", "UNC", "val", 1_500, 3_805, 10_758),
    OfficialSplit("RefCOCO+", "UNC", "testA", 750, 1_975, 5_726),
    OfficialSplit("RefCOCO+", "UNC", "testB", 750, 1_798, 4_889),
    OfficialSplit("RefCOCOg", "UMD", "train", 21_899, 42_226, 80_512),
    OfficialSplit("RefCOCOg", "UMD", "val", 1_300, 2_573, 4_896),
    OfficialSplit("RefCOCOg", "UMD", "test", 2_600, 5_023, 9_602),
    OfficialSplit("RefCOCOg", "Google", "train", 24_698, 44_822, 85_474),
    OfficialSplit("RefCOCOg", "Google", "val", 4_650, 5_000, 9_536),
)
# What evaluations of vision-language models call "val" joins two partitions; a row is an object with its expressions.
JOINED_ROWS = {
    8_811: "the objects of RefCOCO val by UNC (3,811) and Google (5,000) in one list, as lmms-lab/RefCOCO has them",
    7_573: "the objects of RefCOCOg val by UMD (2,573) and Google (5,000) in one list, as lmms-lab/RefCOCOg has them",
}


def find_official_split(images: int, objects: int, texts: int) -> OfficialSplit | None:
    """Return the released split with exactly these numbers; None: there is none."""
    for split in OFFICIAL_SPLITS:
        if (split.images, split.objects) == (images, objects) and split.texts in (texts, None):
            return split
    return None


def name_number(number: int) -> str:
    """Say which released split has this number of expressions or objects; "" if none has."""
    if number in JOINED_ROWS:
        return JOINED_ROWS[number]
    names = [f"the expressions of {split.name}" for split in OFFICIAL_SPLITS if split.texts == number]
    names += [f"the objects of {split.name}" for split in OFFICIAL_SPLITS if split.objects == number]
    return " or ".join(names)

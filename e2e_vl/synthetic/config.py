"""What scenes contain, how they are spoken about and how the imitated detector errs: settings of the drawn data."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from detector.errors import UserError
from e2e_vl.parts import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Settings

Shape = Literal["circle", "square", "triangle", "star", "cross", "diamond"]
Colour = Literal["red", "yellow", "green", "blue", "purple", "white"]
Texture = Literal["plain", "striped", "dotted"]
SHAPES, COLOURS, TEXTURES = (kind.__args__ for kind in (Shape, Colour, Texture))
SIZES = ("small", "big")
Family = Literal["attribute", "superlative", "comparison", "relation"]
Relation = Literal["near", "nearest", "farthest", "overlapping", "in front", "behind"]
VCRFamily = Literal["colour", "match", "pair"]
PairFamily = Literal["both", "exactly one", "side", "more", "total"]
FAMILIES, RELATIONS, VCR_FAMILIES, PAIR_FAMILIES = (kind.__args__ for kind in (Family, Relation, VCRFamily, PairFamily))
_NotEmpty = Meta(min_length=1)
_Range = tuple[PositiveInt, PositiveInt]  # least and most


def _check_range(name: str, value: tuple[int, int]) -> None:
    if value[0] > value[1]:
        raise UserError(f"{name} is {list(value)}; it must be [least, most]")


class SceneConfig(Settings, frozen=True):
    """What scenes contain."""

    min_side: PositiveInt = 128  # height and width of a scene are drawn from this range, pixels
    max_side: PositiveInt = 128
    min_objects: PositiveInt = 5
    max_objects: PositiveInt = 10
    small: _Range = (16, 22)  # range of the longer side of unoccluded small objects, pixels
    big: _Range = (29, 40)
    shapes: Annotated[tuple[Shape, ...], _NotEmpty] = SHAPES  # what objects are drawn from
    colours: Annotated[tuple[Colour, ...], _NotEmpty] = COLOURS
    textures: Annotated[tuple[Texture, ...], _NotEmpty] = ("plain", "striped")
    min_visible: Probability = 0.65  # smallest visible share of an object's pixels
    # of the boxes of two objects; below 0.5, so that IoU 0.5 identifies one object
    max_box_iou: Annotated[float, Meta(ge=0, lt=0.5)] = 0.4
    share: Probability = 0.65  # that an object repeats attributes of an earlier one: few words are not enough
    twin: Probability = 0.06  # that such an object repeats all of them
    touch: Probability = 0.4  # that an object is put close to or over an earlier one

    def __post_init__(self) -> None:
        _check_range("min_objects, max_objects", (self.min_objects, self.max_objects))
        _check_range("min_side, max_side", (self.min_side, self.max_side))
        if not 4 <= self.small[0] <= self.small[1] < self.big[0] <= self.big[1] <= self.min_side - 4:
            raise UserError(
                f"small {list(self.small)} must lie below big {list(self.big)}, both as [least, most] from 4 up, and "
                f"big below min_side {self.min_side} with a margin of 4"
            )

    @property
    def values(self) -> dict[str, tuple[str, ...]]:
        """The values of each attribute."""
        return {"shape": self.shapes, "colour": self.colours, "texture": self.textures, "size": SIZES}


class LanguageConfig(Settings, frozen=True):
    """How scenes are spoken about.

    The families of expressions are attribute ("big striped star"), superlative ("smallest red thing"), comparison
    ("circle bigger than the red star") and relation ("circle next to the red star"). Objects that are not chosen to be
    referred to are used where a family has no expression about the chosen ones.
    """

    family_mix: dict[Family, NonNegativeFloat] = msgspec.field(  # shares among the expressions
        default_factory=lambda: {"attribute": 0.55, "superlative": 0.15, "comparison": 0.1, "relation": 0.2}
    )
    refs_per_image: _Range = (2, 4)  # least and most objects that are chosen to be referred to
    sentences_per_ref: _Range = (2, 3)  # least and most expressions planned for each of them
    relation_mix: dict[Relation, NonNegativeFloat] = msgspec.field(  # tries; rare relations stay rare
        default_factory=lambda: {
            "near": 0.34,
            "nearest": 0.2,
            "farthest": 0.1,
            "overlapping": 0.1,
            "in front": 0.13,
            "behind": 0.13,
        }
    )
    redundant: Probability = 0.4  # share of attribute expressions that may say more than is needed
    vcr_families: Annotated[tuple[VCRFamily, ...], _NotEmpty] = VCR_FAMILIES  # what VCR's questions ask
    # of NLVR2; an even number, in the release about two
    sentences_per_pair: Annotated[int, Meta(ge=2, multiple_of=2)] = 2
    pair_families: Annotated[tuple[PairFamily, ...], _NotEmpty] = PAIR_FAMILIES  # what NLVR2's sentences say

    def __post_init__(self) -> None:
        _check_range("refs_per_image", self.refs_per_image)
        _check_range("sentences_per_ref", self.sentences_per_ref)
        for name in ("family_mix", "relation_mix"):
            if not sum(getattr(self, name).values()) > 0:
                raise UserError(f"{name} must have a share above 0")


class ImitatedDetectorConfig(Settings, frozen=True):
    """How the imitated detector errs."""

    missed: Probability = 0.04  # share of objects without a detection
    wrong_category: Probability = 0.05  # share of detections with another category
    min_iou: Probability = 0.6  # smallest IoU of a detection with its object
    false_alarms: NonNegativeInt = 3  # largest number of boxes per image that show no object
    max_false_iou: Probability = 0.4  # largest IoU of such a box with any object


class SyntheticConfig(Settings, frozen=True):
    """`data.synthetic.config`."""

    scene: SceneConfig = SceneConfig()
    language: LanguageConfig = LanguageConfig()

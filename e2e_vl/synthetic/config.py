"""Settings of the synthetic data: scenes, their pictures, language, and errors of the imitated detector."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from detector.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt
from detector.errors import UserError
from e2e_vl.registry import Config

Shape = Literal["circle", "square", "triangle", "star", "cross", "diamond"]
Colour = Literal["red", "yellow", "green", "blue", "purple", "white"]
Texture = Literal["plain", "striped", "dotted"]
SHAPES = get_args(Shape)
COLOURS = get_args(Colour)
TEXTURES = get_args(Texture)
SIZES = ("small", "big")
Family = Literal["attribute", "superlative", "comparison", "relation"]
VCRFamily = Literal["colour", "match", "pair"]
PairFamily = Literal["both", "exactly one", "side", "more", "total"]
FAMILIES = get_args(Family)
VCR_FAMILIES = get_args(VCRFamily)
PAIR_FAMILIES = get_args(PairFamily)
_NotEmpty = Meta(min_length=1)
_Range = tuple[PositiveInt, PositiveInt]  # least and most
_GreyValue = Annotated[int, Meta(ge=0, le=255)]


class SceneConfig(Config, frozen=True):
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

    def __post_init__(self) -> None:
        has_ranges = self.min_objects <= self.max_objects and self.min_side <= self.max_side
        has_sizes = 4 <= self.small[0] <= self.small[1] < self.big[0] <= self.big[1] <= self.min_side - 4
        if not has_ranges or not has_sizes:
            raise UserError(
                "min_objects and min_side must not exceed max_objects and max_side; small (from 4 up) must be below "
                f"big, and big below min_side with a margin of 4; found {msgspec.structs.asdict(self)}"
            )

    @property
    def values(self) -> dict[str, tuple[str, ...]]:
        """What each attribute of an object is drawn from."""
        return {"shape": self.shapes, "colour": self.colours, "texture": self.textures, "size": SIZES}


class RenderingConfig(Config, frozen=True):
    """How scenes look, without any effect on their objects, boxes and texts; by default, pictures are left as painted.

    Pictures are blurred, then made paler or brighter, then noisy.
    """

    blur: NonNegativeFloat = 0.0  # standard deviation of a Gaussian, pixels
    contrast: NonNegativeFloat = 1.0  # factor of the distance to medium grey
    brightness: Annotated[float, Meta(ge=-255, le=255)] = 0.0  # added to all values, of 255
    noise: NonNegativeFloat = 0.0  # standard deviation of independent noise on all values, of 255
    # RGB values by the name of the colour, instead of those in `RGB` of scenes.py; textures keep their second colours
    palette: dict[Colour, tuple[_GreyValue, _GreyValue, _GreyValue]] = {}


class LanguageConfig(Config, frozen=True):
    """How scenes are described.

    The families of expressions are attribute ("big striped star"), superlative ("smallest red thing"), comparison
    ("circle bigger than the red star") and relation ("circle next to the red star"). Objects that were not
    chosen are referred to only if a family has no expression about the chosen ones.
    """

    family_mix: dict[Family, NonNegativeFloat] = msgspec.field(  # shares among the expressions
        default_factory=lambda: {"attribute": 0.55, "superlative": 0.15, "comparison": 0.1, "relation": 0.2}
    )
    refs_per_image: _Range = (2, 4)  # least and most objects that are chosen to be referred to
    sentences_per_ref: _Range = (2, 3)  # least and most expressions planned for each of them
    # share of further expressions of gRefCOCO's file that are true of nothing in the scene
    no_target: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    vcr_families: Annotated[tuple[VCRFamily, ...], _NotEmpty] = VCR_FAMILIES  # what VCR's questions ask
    # of NLVR2; an even number, in the release about two
    sentences_per_pair: Annotated[int, Meta(ge=2, multiple_of=2)] = 2
    pair_families: Annotated[tuple[PairFamily, ...], _NotEmpty] = PAIR_FAMILIES  # what NLVR2's sentences say


class ImitatedDetectorConfig(Config, frozen=True):
    """Errors of the imitated detector."""

    missed: Fraction = 0.04  # share of objects without a detection
    wrong_category: Fraction = 0.05  # share of detections with another category
    false_alarms: NonNegativeInt = 3  # maximum number of boxes per image without an object
    # range of the IoU of a detection with its object; None = at least 0.6, and mostly much more
    iou: tuple[Fraction, Fraction] | None = None

    def __post_init__(self) -> None:
        if self.iou is not None and not 0 < self.iou[0] < self.iou[1]:
            raise UserError(f"iou is {self.iou}; it must rise, from above 0")


class GeneratorConfig(Config, frozen=True):
    """The settings in `data.synthetic.config`."""

    scene: SceneConfig = SceneConfig()
    language: LanguageConfig = LanguageConfig()
    rendering: RenderingConfig = RenderingConfig()
    detections: ImitatedDetectorConfig = ImitatedDetectorConfig()

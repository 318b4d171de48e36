"""Export a trained run with `torch.export`, for inputs of fixed sizes, or as ONNX, for inputs of any size.

    e2e-vl export --run runs/demo_refcoco --output DIR --image-size 256 256 --boxes 20 --words 24
    e2e-vl export --run runs/demo_refcoco --output DIR --format onnx

The first writes DIR/detector.pt2 and DIR/encoder.pt2; `torch.export.load(FILE).module()` needs torch and torchvision
only:
  detector   pixels float32 [1, 3, H, W], as the detector's config has them (channels, mean, standard deviation), and
             boxes float32 [R, 4] in these pixels -> features float32 [R, D], class logits [R, K + 1]
  encoder    wordpieces and segments int64 [1, L], their mask bool [1, L], features [1, R, D], boxes [1, R, 4] and their
             mask bool [1, R] -> words float32 [1, L, E], regions [1, R, E]
R is --boxes, plus 1 if the encoder uses the whole image: row 0, [0, 0, W - 1, H - 1]. Masks are True at real entries,
which come first. Finding boxes (NMS) and the task's head are not exported. The programs are reloaded and compared with
the model; a difference above 1e-5 is an error.

With --format onnx, the whole way from an image and a text to the answer is exported (docs/onnx.md): DIR/detector.onnx,
DIR/answer.onnx, DIR/tokenizer.json and DIR/settings.json. A difference above 1e-4 is an error. Requires onnx,
onnxscript and onnxruntime: pip install "e2e-vl[onnx]".
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from detector.errors import UserError
from detector.io import atomic_files
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.io import find_run

if TYPE_CHECKING:  # at run time it would import torch
    from torch import nn

    from e2e_vl.model import VisionLanguageModel

TOLERANCE = 1e-5


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("--run", type=Path, required=True, help="run directory of e2e-vl train, or a saved model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--format", choices=("torch", "onnx"), default="torch", help="default: torch")
    sizes = parser.add_argument_group("sizes of --format torch")
    sizes.add_argument("--image-size", type=int, nargs=2, default=(256, 256), metavar=("H", "W"), help="in pixels")
    sizes.add_argument("--boxes", type=int, default=20, metavar="R", help="number of boxes (default: 20)")
    sizes.add_argument("--words", type=int, default=24, metavar="L", help="number of wordpieces (default: 24)")
    args = parser.parse_args(argv)
    find_run(args.run)  # raises an error if the run is missing
    if args.format == "onnx":
        require_onnx()
    from e2e_vl.api.model import load  # late: imports torch

    model = load(args.run, "cpu")
    if args.format == "onnx":
        from e2e_vl.api.onnx_export import export_onnx

        for name, difference in export_onnx(model, args.output).items():
            print(f"written: {args.output / name} (largest difference {difference:.1e})")
        return 0
    if model.config.detector.backend != "builtin":
        raise UserError(f"{args.run}: only the built-in detector is exported, not {model.config.detector.backend}.")
    if model.network.encoder.reads_proposals:
        raise UserError(f"{args.run} reads the scores of proposed boxes, which the exported encoder has no input for.")
    for name, difference in export(model.network, args.output, tuple(args.image_size), args.boxes, args.words).items():
        print(f"written: {args.output / name}.pt2 (largest difference {difference:.1e})")
    return 0


def require_onnx() -> None:
    """Raise a UserError if a package of the extra is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'--format onnx needs {package}; install it with pip install "e2e-vl[onnx]".')


def export(
    network: VisionLanguageModel, output: Path, size: tuple[int, int], boxes: int, words: int
) -> dict[str, float]:
    """Write both programs, and return their largest differences from the model."""
    import torch

    regions = boxes + int(network.encoder.uses_whole_image)
    random = torch.Generator().manual_seed(0)
    corners = torch.rand(2, regions, 2, generator=random).sort(dim=0).values * torch.tensor([size[1] - 1, size[0] - 1])
    boxes = torch.cat(list(corners), dim=1)
    rows = torch.arange(regions)[None]
    positions = torch.arange(words)[None]
    features = torch.randn(1, regions, network.encoder.config.feature_dim, generator=random)
    ids = torch.randint(network.encoder.config.vocab_size, (1, words), generator=random)
    encode, describe = make_modules(network, size)
    programs = {
        "detector": (describe, (torch.randn(1, 3, *size, generator=random), boxes)),
        "encoder": (encode, (ids, 0 * ids, positions < words - 2, features, boxes[None], rows < regions - 2)),
    }
    differences = {}
    with atomic_files(output, "encoder.pt2") as part, torch.no_grad():
        for name, (module, inputs) in programs.items():
            torch.export.save(torch.export.export(module, inputs), part / f"{name}.pt2")
            exported = torch.export.load(part / f"{name}.pt2").module()
            outputs = zip(exported(*inputs), module(*inputs), strict=True)
            difference = max((actual - expected).abs().max().item() for actual, expected in outputs)
            if not difference <= TOLERANCE:
                raise FloatingPointError(f"The exported {name} differs from the model by {difference:.1e}.")
            differences[name] = difference
    return differences


def make_modules(network: VisionLanguageModel, size: tuple[int, int]) -> tuple[nn.Module, nn.Module]:
    """Wrap the encoder and the detector as modules with tensors as inputs and outputs."""
    import torch
    from torch import nn

    from detector.roi_pooler import to_rois
    from detector.structures import ImageBatch
    from e2e_vl.structures import TextBatch, TextRegions

    class Encode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = network.encoder.eval()

        def forward(self, input_ids, token_type_ids, text_mask, features, boxes, region_mask):
            number = region_mask.shape[1]
            row = torch.arange(number)[None] - int(self.encoder.uses_whole_image)
            zero = torch.zeros_like(row)
            sizes = torch.tensor(size, dtype=torch.float32).expand(1, number, 2)
            image = zero.masked_fill(~region_mask, -1)
            row = row.masked_fill(~region_mask, -1)
            regions = TextRegions(features, boxes, sizes, region_mask, zero, image, row, zero.bool(), zero - 1)
            regions.lengths = [number]  # as if there were no padding: the lengths are fixed, and the masks say the rest
            texts = TextBatch(input_ids, token_type_ids, text_mask, lengths=torch.tensor([input_ids.shape[1]]))
            encoded = self.encoder(texts, regions)
            return encoded.text, encoded.regions

    class Describe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.detector = network.detector.eval()

        def forward(self, pixels, boxes):
            sizes = torch.tensor([size])
            maps = self.detector.features(ImageBatch(pixels, sizes, sizes, ["image"]))
            features = self.detector.describe(maps, to_rois([boxes]))
            return features.region, self.detector.roi_heads.box_predictor.class_logits(features.predictor)

    return Encode(), Describe()

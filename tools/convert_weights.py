"""Read a detector's published checkpoint, say how it fits, and write it in this project's form.

    python tools/convert_weights.py faster_rcnn_from_caffe_attr.pkl \
        --config configs/detector/bottom_up_attention.yaml --output weights/bottom_up_attention

Reads Detectron2's .pkl and .pth, Caffe2 and torchvision names, both ports of bottom-up attention, VL-BERT's
resnet101-pt-vgbua-0000.model, .safetensors files, and folders that hold a detector. Writes, by the output's name:
  DIR            config.yaml and model.safetensors: detector.weights of a run, --weights of tools/extract_demo.py
  x.safetensors  the weights alone, with Detectron2's names
  x.pth          the same, as Detectron2 itself loads them
Converting is not needed before training: detector.weights takes the published files too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from detector.checkpoint import (
    CONFIG_NAME,
    EXPECT,
    WEIGHTS_NAME,
    convert_checkpoint,
    load_converted,
    save_weights,
)
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="file or folder to read")
    parser.add_argument("--config", type=Path, required=True, help="Detectron2 YAML file of the detector")
    parser.add_argument("--output", type=Path, required=True, help="folder, .pth or .safetensors to write")
    parser.add_argument(
        "--expect",
        choices=EXPECT,
        default="all",
        help="what the file must hold; only what it holds is written (default: all)",
    )
    options = parser.parse_args(argv)
    try:
        convert(options.weights, options.config, options.output, options.expect)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(weights: Path, config: Path, output: Path, expect: str) -> None:
    """Read, check, print the report, and write the tensors that were matched: nothing random gets into the file."""
    is_folder = output.suffix not in (".pth", ".safetensors")
    if is_folder and (output.is_file() or output.suffix in (".pkl", ".pt", ".bin", ".model")):
        raise ValueError(f"{output} is not a folder, a .pth or a .safetensors file.")
    detector = FasterRCNN(DetectorConfig.from_yaml(config))
    converted = convert_checkpoint(detector, weights)
    report = load_converted(detector, converted, weights, expect=expect)
    print(report)
    if is_folder:
        output.mkdir(parents=True, exist_ok=True)
        (output / CONFIG_NAME).write_text(detector.config.to_yaml(), encoding="utf-8")
    save_weights(
        {name: converted.tensors[name] for name in report.matched}, output / WEIGHTS_NAME if is_folder else output
    )
    print(f"written: {output}")


if __name__ == "__main__":
    raise SystemExit(main())

"""Convert published weights to this project's format, or export a model of ours to an official format.

A detector's checkpoint (Detectron2's .pkl and .pth, Caffe2 and torchvision names, both ports of bottom-up attention,
VL-BERT's resnet101-pt-vgbua-0000.model, .safetensors files, and folders that hold a detector):

    e2e-vl convert faster_rcnn_from_caffe_attr.pkl \
        --config configs/detector/bottom_up_attention.yaml --output weights/bottom_up_attention

Writes, by the output's name:
  DIR            config.yaml and model.safetensors: detector.weights of a run, --weights of `e2e-vl extract`
  x.safetensors  the weights alone, with Detectron2's names
  x.pth          the same, as Detectron2 itself loads them

A whole model of the official VL-BERT code, with the settings of a run, as a folder that `e2e-vl evaluate` takes:

    e2e-vl convert refcoco.model --run configs/refcoco/vl_bert_base.yaml data.root=DATA --output DIR

A model of ours (a run directory) as a file that the official VL-BERT code loads:

    e2e-vl convert runs/refcoco_plus_vl_bert_base --output refcoco.model

With VisualBERT as encoder: x.th for its official code; with LXMERT: x.pth for its official code. With either of them
DIR/model.safetensors (and config.json) for transformers, whose models take DIR:

    e2e-vl convert runs/vqa_lxmert --output DIR/model.safetensors

Beside a model of VQA its answers are written, in the order of the classes: vqa.model and vqa.answers.txt.

Converting is not needed before training: detector.weights, encoder.weights and task.weights take the published files.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from detector.config import EXPECTED_PARTS
from detector.errors import UserError
from detector.io import atomic_files, write_text
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import load_config


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("weights", type=Path, help="file or folder to read")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--config", type=Path, help="Detectron2 YAML file of the detector to convert")
    kind.add_argument("--run", type=Path, help="YAML file of a run: convert a whole official VL-BERT model")
    parser.add_argument("--output", type=Path, required=True, help="folder, .pth, .safetensors, .model or .th to write")
    expect_help = "what the file must hold; only what it holds is written (default: all)"
    parser.add_argument("--expect", choices=EXPECTED_PARTS, default="all", help=expect_help)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --run: settings that override the file")
    options = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    if options.run is not None:
        import_official(options.weights, options.run, options.output, options.overrides)
    elif options.overrides:
        raise UserError(f"{options.overrides[0]}: settings are for --run.")
    elif options.config is not None:
        convert(options.weights, options.config, options.output, options.expect)
    else:
        export_official(options.weights, options.output)
    return 0


def convert(weights: Path, config: Path, output: Path, expect: str) -> None:
    """Load weights into the detector, print the report, and write the matched tensors only."""
    # late: they import torch
    from detector.checkpoint import CONFIG_NAME, WEIGHTS_NAME, load_checkpoint, save_weights
    from detector.config import DetectorConfig
    from detector.faster_rcnn import FasterRCNN

    detector = FasterRCNN(DetectorConfig.from_yaml(config))
    report = load_checkpoint(detector, weights, expect=expect)
    print(report)
    is_folder = output.suffix not in (".pth", ".safetensors")
    if is_folder:
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / CONFIG_NAME, detector.config.to_yaml())
    matched = {name: value for name, value in detector.state_dict().items() if name in set(report.matched)}
    save_weights(matched, output / WEIGHTS_NAME if is_folder else output)
    print(f"written: {output}")


def import_official(weights: Path, run: Path, output: Path, overrides: list[str]) -> None:
    """Write a model folder with the weights of an official file; missing tensors stay random and are reported."""
    config = load_config(run, overrides)
    from e2e_vl.run.build import build_model, build_tokenizer, resolve_config  # late: it imports torch
    from e2e_vl.run.checkpoint import save_model

    start = {"weights": str(weights)}
    detector = config.detector
    if detector.backend != "precomputed":
        detector = msgspec.structs.replace(detector, **start, expect="backbone")
    encoder, task = (msgspec.structs.replace(part, **start) for part in (config.encoder, config.task))
    config = resolve_config(msgspec.structs.replace(config, detector=detector, encoder=encoder, task=task))
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    with atomic_files(output, "config.yaml") as part:
        save_model(part, config, model, tokenizer)
    print(f"written: {output}")


def export_official(folder: Path, output: Path) -> None:
    """Export a trained model to an official format, and print the tensors that are left out.

    For VQA, the answers are written beside it, in the order of the classes.
    """
    from e2e_vl.run.build import ADAPTERS  # late: it imports torch
    from e2e_vl.run.checkpoint import load_model, load_saved_config

    encoder = load_saved_config(folder).encoder.name
    adapters = {adapter.suffix: adapter for adapter in ADAPTERS.get(encoder, ()) if adapter.suffix}
    if output.suffix not in adapters:
        raise UserError(
            f"--output {output}: official files of a run with the encoder '{encoder}' end with one of "
            f"{', '.join(adapters)}; to read weights, give --config for a detector or --run for an official model."
        )
    config, model, _ = load_model(folder)
    lines = None
    if model.task.chooses_answers:  # before anything is written
        lines = official_lines(model.task.answers, model.task.parse_official_answer)
    left_out = adapters[output.suffix].export(model, config.task.name, output)
    print(f"left out: {len(left_out)}", *(f"  {name}" for name in left_out), f"written: {output}", sep="\n")
    if lines is not None:
        path = output.with_suffix(".answers.txt")
        write_text(path, "".join(f"{line}\n" for line in lines))
        print(f"written: {path} ({len(lines)} answers in the order of the classes; a run needs both)")


def official_lines(answers: Sequence[str], read: Callable[[str], str]) -> list[str]:
    """The lines of an official answer vocabulary, one per answer in the order of the classes.

    Several classes may have the same answer after normalisation; they get different spellings ("t shirt", "t-shirt"),
    because `read_answers` rejects duplicate lines.

    Args:
        read: the official code's normalisation of a line.
    """
    used: dict[str, int] = {}  # line -> number of its answer
    for number, answer in enumerate(answers):
        own = answer.strip().lower()
        # official code deletes the first 32 periods that no digit follows
        spellings = (own, own.replace(" ", "-"), own.replace(" ", "-", 1), *(own + "." * dots for dots in range(1, 33)))
        line = next((one for one in spellings if one and one not in used and read(one) == answer), None)
        if line is None or "\n" in line:
            raise UserError(
                f"Answer {number} is {answer!r}, which an official answer vocabulary (one answer per line, each once) "
                "cannot hold; train with a list without it, task.config.answers."
            )
        used[line] = number
    return list(used)

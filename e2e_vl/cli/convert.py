"""Convert published weights to this project's format, or export a trained model to an official format.

A detector (Detectron2's .pkl or .pth, Caffe2 or torchvision names, both ports of bottom-up attention, VL-BERT's
resnet101-pt-vgbua-0000.model, .safetensors, or a detector's folder):

    e2e-vl convert faster_rcnn_from_caffe_attr.pkl \\
        --config configs/detector/bottom_up_attention.yaml --output weights/bottom_up_attention

The output depends on its suffix:
  DIR            config.yaml and model.safetensors, for detector.weights of a run or --weights of `e2e-vl extract`
  x.safetensors  only the weights, with Detectron2's names
  x.pth          only the weights, in a file that Detectron2 loads

A whole model of the official VL-BERT code, to a folder that `e2e-vl evaluate` loads; --run is the config of that model:

    e2e-vl convert refcoco.model --run configs/refcoco/vl_bert_base.yaml data.root=DATA --output DIR

A run directory, to a file that the official VL-BERT code loads:

    e2e-vl convert runs/refcoco_plus_vl_bert_base --output refcoco.model

For the official code of VisualBERT, write a .th file, for that of LXMERT a .pth file. For either encoder,
DIR/model.safetensors (with config.json) makes DIR a model that transformers loads:

    e2e-vl convert runs/vqa_lxmert --output DIR/model.safetensors

For VQA, the answers are written beside the model, in the order of the classes: vqa.model and vqa.answers.txt.

Training needs no conversion: detector.weights, encoder.weights and task.weights take the published files.
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
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config_files import find_config, load_config


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    parser = make_parser(__doc__, prog)
    parser.add_argument("weights", type=Path, help="file or folder to read")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--config", type=Path, help="Detectron2 YAML file of the detector to convert")
    kind.add_argument("--run", type=Path, help="YAML file of a run, to convert a whole official VL-BERT model")
    parser.add_argument("--output", type=Path, required=True, help="folder, .pth, .safetensors, .model or .th to write")
    expect_help = "what the file must contain; only matching tensors are written (default: all)"
    parser.add_argument("--expect", choices=EXPECTED_PARTS, default="all", help=expect_help)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --run: settings that override the file")
    args = parse_with_settings(parser, argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    if args.run is not None:
        import_official(args.weights, args.run, args.output, args.overrides)
    elif args.overrides:
        raise UserError(f"{args.overrides[0]}: settings need --run.")
    elif args.config is not None:
        convert(args.weights, args.config, args.output, args.expect)
    else:
        export_official(args.weights, args.output)
    return 0


def convert(weights: Path, config: Path, output: Path, expect: str) -> None:
    """Load weights into the detector, print a report, and write only the tensors that match."""
    # late: imports torch
    from detector.checkpoint import CONFIG_NAME, WEIGHTS_NAME, load_checkpoint, save_weights
    from detector.config import DetectorConfig
    from detector.faster_rcnn import FasterRCNN

    detector = FasterRCNN(DetectorConfig.from_yaml(find_config(config)))
    report = load_checkpoint(detector, weights, expect=expect)
    print(report)
    file = output
    if output.suffix not in (".pth", ".safetensors"):  # a folder
        file = output / WEIGHTS_NAME
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / CONFIG_NAME, detector.config.to_yaml())
    matched = set(report.matched)
    save_weights({name: value for name, value in detector.state_dict().items() if name in matched}, file)
    print(f"written: {output}")


def import_official(weights: Path, run: Path, output: Path, overrides: list[str]) -> None:
    """Write a model folder with the weights of an official file; tensors that it lacks stay random and are reported."""
    config = load_config(run, overrides)
    from e2e_vl.run.build import build_model, build_tokenizer, resolve_config  # late: imports torch
    from e2e_vl.run.checkpoint import save_model

    detector = config.detector
    if detector.backend != "precomputed":
        detector = msgspec.structs.replace(detector, weights=str(weights), expect="backbone")
    encoder = msgspec.structs.replace(config.encoder, weights=str(weights))
    task = msgspec.structs.replace(config.task, weights=str(weights))
    config = resolve_config(msgspec.structs.replace(config, detector=detector, encoder=encoder, task=task))
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    with atomic_files(output, "config.yaml") as part:
        save_model(part, config, model, tokenizer)
    print(f"written: {output}")


def export_official(folder: Path, output: Path) -> None:
    """Export a trained model to an official format, and print the tensors that are left out."""
    from e2e_vl.run.build import ADAPTERS  # late: imports torch
    from e2e_vl.run.checkpoint import load_model, load_saved_config

    encoder = load_saved_config(folder).encoder.name
    adapters = {adapter.suffix: adapter for adapter in ADAPTERS.get(encoder, ()) if adapter.suffix}
    if output.suffix not in adapters:
        raise UserError(
            f"--output {output}: a run with the encoder '{encoder}' exports to one of {', '.join(adapters)}; to "
            "convert weights, give --config for a detector or --run for an official model."
        )
    config, model, _ = load_model(folder)
    lines = None
    vocabulary = model.task.answer_vocabulary
    if model.task.vocabulary_class is not None:  # before anything is written
        lines = vocabulary_lines(vocabulary.answers, vocabulary.parse_official_answer)
    left_out = adapters[output.suffix].export(model, config.task.name, output)
    print(f"left out: {len(left_out)}", *(f"  {name}" for name in left_out), f"written: {output}", sep="\n")
    if lines is not None:
        path = output.with_suffix(".answers.txt")
        write_text(path, "".join(f"{line}\n" for line in lines))
        print(f"written: {path} ({len(lines)} answers in the order of the classes; a run needs both)")


def vocabulary_lines(answers: Sequence[str], normalise: Callable[[str], str]) -> list[str]:
    """Return the lines of an official answer vocabulary, one per answer in the order of the classes.

    Classes whose answers are equal after `normalise`, the official code's step, get different spellings ("t shirt",
    "t-shirt"), because `read_answers` rejects duplicate lines.
    """
    used: dict[str, int] = {}  # line -> number of its answer
    for number, answer in enumerate(answers):
        text = answer.strip().lower()
        spellings = [text, text.replace(" ", "-"), text.replace(" ", "-", 1)]
        # official code deletes the first 32 periods that no digit follows
        spellings += [text + "." * dots for dots in range(1, 33)]
        line = None
        for spelling in spellings:
            if spelling and spelling not in used and normalise(spelling) == answer:
                line = spelling
                break
        if line is None or "\n" in line:
            raise UserError(
                f"Answer {number} is {answer!r}, which an official answer vocabulary (one answer per line, each once) "
                "cannot hold; train with a list without it, task.config.answers."
            )
        used[line] = number
    return list(used)

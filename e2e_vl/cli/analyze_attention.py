"""Measure how well the attention heads of a trained run ground entities and syntactic relations.

    e2e-vl analyze-attention --run runs/demo_flickr30k --split val --boxes online \\
        --parses data/demo_flickr30k/flickr30k/parses/val.conllu
    e2e-vl analyze-attention --num-processes 4 --run RUN --split val --boxes gt --spacy en_core_web_sm

Works with any run whose encoder has attention, on captions with boxes for phrases (Flickr30K Entities): the run's own
data, or those of another config (--data). No word is masked, whatever the task of the run.

Entity grounding: how often the region that a phrase attends to most has an IoU of at least 0.5 with its box.
Syntactic grounding: the same for a word that is related to a word of the phrase; parses come from a CoNLL-U file
(--parses) or an installed spaCy model (--spacy). A head is active if more than 20 % of that attention is on regions.
All follow section 3 of VisualBERT's ACL paper; further options below cover what the paper does not specify. Each
attention graph of an encoder (LXMERT: language, vision, cross) is measured separately.

Writes to --output: attention.html (everything on one page), attention.json, heads.csv, table2_*.csv,
figures, and overlays/*.jpg (regions coloured by the attention of phrases). See docs/analysis.md.
"""

from __future__ import annotations

import argparse
import typing
from pathlib import Path

from e2e_vl.analysis.options import AnalysisConfig, list_options, option_flag, parse_head
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.cli.processes import add_process_options, run_in_processes
from e2e_vl.config import BoxSource
from e2e_vl.config_files import load_config
from e2e_vl.io import find_model_folder
from e2e_vl.registry import decode


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = make_parser(__doc__, prog)
    parser.add_argument("--run", type=Path, required=True, help="run directory of e2e-vl train, or a saved model")
    parser.add_argument("--split", default="val", help="split of the data set (default: val)")
    boxes_help = "source of candidate boxes (default: online)"
    parser.add_argument("--boxes", default="online", choices=[*map(str, BoxSource.for_evaluation())], help=boxes_help)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="CONFIG",
        help="config with the data to use instead of the run's; images are resized as in the run",
    )
    parses = parser.add_mutually_exclusive_group()
    parses.add_argument("--parses", type=Path, metavar="FILE", help="CoNLL-U file of the parsed captions")
    parses.add_argument("--spacy", metavar="MODEL", help="installed spaCy model with a parser, such as en_core_web_sm")
    parser.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="HEAD",
        help="heads to draw, as LAYER-HEAD or GRAPH:LAYER-HEAD (default: the best ones)",
    )
    parser.add_argument("--pictures", type=int, default=6, help="number of captions to draw (default: 6)")
    parser.add_argument("--max-images", type=int, help="use only this many images of the split (default: all)")
    parser.add_argument("--output", type=Path, help="output folder (default: RUN/attention/SPLIT_BOXES)")
    add_process_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    group = parser.add_argument_group("details that the paper does not specify")
    for name, kind, default, meaning in list_options():
        group.add_argument(
            option_flag(name),
            type=type(default),
            default=default,
            choices=typing.get_args(kind) or None,
            help=f"{meaning.replace('%', '%%')} (default: {default})",
        )
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    args = parse_with_settings(build_parser(prog), argv)
    run_overrides = args.overrides
    if args.data is not None:  # the settings under `data` come from that config
        data_overrides = [word for word in args.overrides if word.startswith("data.")]
        run_overrides = [word for word in args.overrides if not word.startswith("data.")]
    load_config(find_model_folder(args.run) / "config.yaml", run_overrides)  # before torch is imported
    if args.data is not None:
        load_config(args.data, [*data_overrides, "output=unused"])
    options = decode({name: getattr(args, name) for name, *_ in list_options()}, AnalysisConfig, "options")
    options.require_parses(has_parses=args.parses is not None or args.spacy is not None)
    for head in args.heads:
        parse_head(head, options.first_number)
    status = run_in_processes(args, "analyze-attention", argv)
    if status is not None:
        return status
    from e2e_vl.analysis.run import AnalysisArguments, analyze_attention  # late: imports torch

    arguments = AnalysisArguments(
        run=args.run,
        split=args.split,
        boxes=BoxSource(args.boxes),
        output=args.output,
        data=args.data,
        parses=args.parses,
        spacy_model=args.spacy,
        options=options,
        heads=tuple(args.heads),
        pictures=args.pictures,
        max_images=args.max_images,
        overrides=tuple(args.overrides),
    )
    results, page = analyze_attention(arguments)
    if page is not None:  # the main process
        for line in results.summary_lines():
            print(line)
        print(f"page: {page}")
    return 0

"""Measure the grounding of entities and syntactic relations by the attention heads of a trained run.

    e2e-vl analyze-attention --run runs/demo_flickr30k --split val --boxes online \\
        --parses data/demo_flickr30k/flickr30k/parses/val.conllu
    accelerate launch -m e2e_vl analyze-attention --run RUN --split val --boxes gt --spacy en_core_web_sm

Works for any run with an attention encoder, on captions with boxes for phrases (Flickr30K Entities): the data of the
run, or of another config (--data). Captions are used without masked words, whatever the task of the run.

Entity grounding: how often a phrase attends most, among the regions, to a region with IoU of at least 0.5 with its box.
Syntactic grounding: the same for the word at the other end of a relation; parses come from a CoNLL-U file (--parses) or
from an installed spaCy model (--spacy). A head is active if more than 20 % of that attention is on regions. Both follow
section 3 of VisualBERT's ACL paper; see "options" for details that the paper does not specify. An encoder with several
attention graphs (LXMERT: language, vision, cross) is measured graph by graph.

Writes into --output: attention.html (everything on one page), attention.json, heads.csv, relations.csv, table2_*.csv,
the figures and overlays/*.jpg, regions coloured by the attention of phrases. docs/analysis.md says more.
"""

from __future__ import annotations

import argparse
import typing
from pathlib import Path

from e2e_vl.analysis.options import AnalysisOptions, flag, options, parse_head
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import BoxSource, load_config
from e2e_vl.io import find_model_folder
from e2e_vl.parts import decode


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The options of the command."""
    parser = make_parser(__doc__, prog)
    parser.add_argument("--run", type=Path, required=True, help="run directory of tools/train.py, or a saved model")
    parser.add_argument("--split", default="val", help="split of the data set (default: val)")
    parser.add_argument("--boxes", default="online", choices=BoxSource.for_evaluation())
    parser.add_argument(
        "--data",
        type=Path,
        metavar="CONFIG",
        help="config whose data are read in place of those of the run, in the sizes of the run",
    )
    parses = parser.add_mutually_exclusive_group()
    parses.add_argument("--parses", type=Path, metavar="FILE", help="CoNLL-U file with the parses of the captions")
    parses.add_argument("--spacy", metavar="MODEL", help="installed spaCy model that parses, such as en_core_web_sm")
    parser.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="HEAD",
        help="heads whose pictures are drawn, as LAYER-HEAD or GRAPH:LAYER-HEAD (default: the best ones)",
    )
    parser.add_argument("--pictures", type=int, default=6, help="captions with pictures (default: 6)")
    parser.add_argument("--max-images", type=int, help="only the first images of the split (default: all)")
    parser.add_argument("--output", type=Path, help="folder of the results (default: one in RUN/attention)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data.root=DIR")
    group = parser.add_argument_group("options", "details that the paper does not specify")
    for name, kind, default, meaning in options():
        group.add_argument(
            flag(name),
            type=type(default),
            default=default,
            choices=typing.get_args(kind) or None,
            help=f"{meaning.replace('%', '%%')} (default: {default})",
        )
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    arguments = build_parser(prog).parse_intermixed_args(argv)
    of_data = [word for word in arguments.overrides if arguments.data is not None and word.startswith("data.")]
    words = [word for word in arguments.overrides if word not in of_data]
    load_config(find_model_folder(arguments.run) / "config.yaml", words)  # before torch is imported
    if arguments.data is not None:
        load_config(arguments.data, [*of_data, "output=unused"])
    chosen = decode({name: getattr(arguments, name) for name, *_ in options()}, AnalysisOptions, "options")
    chosen.require_parses(given=arguments.parses is not None or arguments.spacy is not None)
    for head in arguments.heads:
        parse_head(head, chosen.first_number)
    from e2e_vl.analysis.run import AnalysisArguments, analyze_attention  # late: it imports torch

    request = AnalysisArguments(
        run=arguments.run,
        split=arguments.split,
        boxes=BoxSource(arguments.boxes),
        output=arguments.output,
        data=arguments.data,
        parses=arguments.parses,
        spacy_model=arguments.spacy,
        options=chosen,
        heads=tuple(arguments.heads),
        pictures=arguments.pictures,
        max_images=arguments.max_images,
        overrides=tuple(arguments.overrides),
    )
    results, page = analyze_attention(request)
    if page is not None:  # the main process
        for line in results.lines():
            print(line)
        print(f"page: {page}")
    return 0

"""Score anybody's predictions of referring expressions, or of the phrases of captions, against the annotations.

    e2e-vl score predictions.json --data refcoco+ --split val --root DATA
    e2e-vl score results.bbox.json --data refcoco+ --split val --questions finetune_refcoco+_val.json
    e2e-vl score answers.jsonl --data refcoco+ --split testA --questions questions.jsonl --coordinates 0-1000

Reads predictions of this package, COCO results, boxes of MDETR and MMDetection, and answers of vision-language models
(docs/scoring.md). Prints accuracies at IoUs from 0.5 to 0.9, the mean IoU and the ceiling of the candidates; for
gRefCOCO Pr@(F1=1), N-acc and T-acc; for Flickr30K Entities R@1, R@5 and R@10; each with a 95 % bootstrap interval.
Records that are missing, repeated or unknown are errors or counted, never left out in silence.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from detector.errors import MissingFileError, UserError
from detector.io import read_yaml, write_json
from e2e_vl.cli.main import make_parser, parse_with_settings, print_errors
from e2e_vl.config import DataConfig
from e2e_vl.config_files import CONFIGS, load_config
from e2e_vl.data.overlap import ImageIdLookup, read_visual_genome
from e2e_vl.samples import EntityPhrases, ReferredBoxes
from e2e_vl.scoring.coordinates import LAYOUTS, PIXELS, SCALES
from e2e_vl.scoring.intervals import RESAMPLES
from e2e_vl.scoring.leakage import add_leakage
from e2e_vl.scoring.measures import CONVENTIONS
from e2e_vl.scoring.phrases import score_phrases
from e2e_vl.scoring.referring import score_referring
from e2e_vl.scoring.report import Report, ScoreOptions
from e2e_vl.scoring.truths import Truths, read_truths


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = make_parser(__doc__, prog)
    file = {"type": Path, "metavar": "FILE"}
    data_help = "a data set that `e2e-vl download` lists, such as refcoco+, or the YAML file of a run"
    parser.add_argument("predictions", **file, help="JSON, or JSON lines (.jsonl)")
    parser.add_argument("--data", required=True, metavar="NAME", help=data_help)
    parser.add_argument("--split", required=True, help="split of the data set, such as val or testA")
    parser.add_argument("--root", metavar="DATA", help="folder of the data set (default: DATA, or the YAML file's)")
    parser.add_argument("--protocol", metavar="NAME", help="partition, the name in `refs(NAME).p`: unc, google or umd")
    parser.add_argument("--questions", **file, help="what the model was asked, where the records only have its ids")
    parser.add_argument("--answer", metavar="KEY", help="key of the prediction in a record, where several could be it")
    parser.add_argument("--boxes", choices=LAYOUTS, help="layout of the boxes (default: the format's)")
    scales = (PIXELS, *SCALES)
    parser.add_argument("--coordinates", choices=scales, help="scale of the boxes (default: the format's, or found)")
    parser.add_argument("--iou", choices=CONVENTIONS, default="continuous", help="IoU convention (default: continuous)")
    parser.add_argument("--min-score", type=float, metavar="S", help="gRefCOCO: least score of a predicted box")
    missing_help = "texts without a record: count them as wrong, or score the others only (default: an error)"
    parser.add_argument("--missing", choices=("wrong", "skip"), help=missing_help)
    unknown_help = "leave out records about texts that are not in the split, and count them (default: an error)"
    parser.add_argument("--skip-unknown", action="store_true", help=unknown_help)
    parser.add_argument("--pretraining-images", **file, help="images of a pre-training: count those of the split")
    ids_help = "source of these ids, if names do not show it"
    parser.add_argument("--pretraining-ids", choices=("coco", "vg"), help=ids_help)
    parser.add_argument("--visual-genome", **file, help="Visual Genome's image_data.json, with COCO's ids")
    resamples_help = f"resamples of the bootstrap (default: {RESAMPLES})"
    parser.add_argument("--resamples", type=int, default=RESAMPLES, metavar="N", help=resamples_help)
    parser.add_argument("--json", **file, help="file for all numbers")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of `data` that override the file")
    return parser


@print_errors
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    args = parse_with_settings(build_parser(prog), argv)
    options = ScoreOptions(
        predictions=args.predictions,
        data=args.data,
        split=args.split,
        questions=args.questions,
        answer_key=args.answer,
        layout=args.boxes,
        scale=args.coordinates,
        iou=args.iou,
        min_score=args.min_score,
        missing=args.missing,
        skip_unknown=args.skip_unknown,
        resamples=args.resamples,
    )
    if not args.predictions.is_file():
        raise MissingFileError(f"{args.predictions}: no such file in {Path.cwd()}; check the path.")
    genome = None if args.visual_genome is None else read_visual_genome(args.visual_genome)
    id_lookup = ImageIdLookup(genome)
    truths = read_annotations(args, id_lookup)
    report = Report(facts={"data": args.data, "split": args.split, "predictions": str(args.predictions)})
    kind = type(truths.texts[0].truth)
    if kind is EntityPhrases:
        texts, predictions = score_phrases(options, truths, report)
    elif kind is ReferredBoxes:
        texts, predictions = score_referring(options, truths, report)
    else:
        raise UserError(f"{args.data}: its texts refer to no boxes; score predictions of referring expressions.")
    if args.pretraining_images is not None:
        lists = id_lookup.of_list(args.pretraining_images, args.pretraining_ids, "--pretraining-ids")
        seen_ids = set().union(*lists)
        add_leakage(args.pretraining_images, seen_ids, truths, texts, predictions, args.iou, report)
    print("\n".join(report.lines))
    if args.json is not None:
        write_json(args.json, report.as_json())
    return 0


def read_annotations(args: argparse.Namespace, id_lookup: ImageIdLookup) -> Truths:
    """Read the annotations of the split."""
    data = data_settings(args.data, args.root, args.protocol, args.overrides)
    try:
        return read_truths(data, args.split, id_lookup)
    except MissingFileError as error:
        if args.data not in read_sets():
            raise
        raise MissingFileError(
            f"{error} --root is the folder of the data set, which `e2e-vl download {args.data}` fetches."
        ) from error


def read_sets() -> dict[str, dict]:
    """Read the data sets of `e2e-vl download`: name -> its files, and the configs that read them."""
    return read_yaml(CONFIGS / "downloads.yaml")["sets"]


def data_settings(name: str, root: str | None, protocol: str | None, overrides: Iterable[str]) -> DataConfig:
    """Return the settings of a data set by the name of its download, or by the config of a run."""
    sets = read_sets()
    config = name
    words = [*overrides, "output=unused"]
    if name in sets:
        if not sets[name].get("configs"):
            raise UserError(f"{name}: no config reads this download; give the YAML file of a run as --data.")
        config = CONFIGS / f"{sets[name]['configs'][0]}.yaml"
        root = root or "DATA"
    if root is not None:
        words.insert(0, f"data.root={root}")
    data = load_config(config, words).data
    if protocol is not None:
        refs = data.files.get("refs", "")
        changed = re.sub(r"\([^()]*\)", f"({protocol})", refs)
        if "(" not in refs:
            raise UserError(f"--protocol: the file of {name} is {refs or 'no refs file'}, without a partition in it.")
        data = load_config(config, [*words, f"data.files.refs={changed}"]).data
    return data

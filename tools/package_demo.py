"""Make the model that ships with the package (`e2e_vl.load("demo")`) from a run of configs/demo/refcoco.yaml.

    python tools/package_demo.py runs/demo_refcoco
    python tools/package_demo.py --measure

Writes e2e_vl/demo: settings, weights in half precision, scores of the run, version, model card, and about.json with
what the model knows and the first twelve scenes of the test split, with one expression of each family and
one that nothing fits. With --measure, only those scores of the packaged model that its run did not measure
(`MEASURED_AGAIN`) are measured, and replaced in metrics.json and the model card.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import e2e_vl
from detector.errors import UserError
from detector.io import atomic_folder, read_json, write_json
from e2e_vl.cli.main import make_parser, print_errors
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import differences, load_config
from e2e_vl.io import DEMO
from e2e_vl.samples import SampleText
from e2e_vl.synthetic.language import RELATIONS

SCENES = 12
# thresholds of sure answers, and F1 by the official rule of gRefCOCO
MEASURED_AGAIN = ("sure_threshold", "f1_precision")


@print_errors
def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("run", type=Path, nargs="?", help="run directory")
    action.add_argument("--measure", action="store_true", help="measure some scores of the packaged model again")
    args = parser.parse_args(argv)
    if args.measure:
        measure_again()
    else:
        package(args.run)
    return 0


def package(run: Path) -> None:
    """Replace e2e_vl/demo, unless the run has other settings than the demo's config."""
    import torch
    from safetensors.torch import load_file, save_file

    from e2e_vl.run.checkpoint import load_saved_config, save_model

    run_config = load_saved_config(run)
    demo_config = load_config("demo/refcoco")
    # the run as the demo's config names its folders and detector
    saved_config = replace(
        run_config,
        output=demo_config.output,
        data=replace(run_config.data, root=demo_config.data.root),
        detector=replace(run_config.detector, config=demo_config.detector.config),
    )
    changed = differences(saved_config, demo_config)
    if changed:
        raise UserError(f"{run} was not trained with the settings of demo/refcoco: {'; '.join(changed)}")

    model = e2e_vl.load(run, "cpu")
    with atomic_folder(DEMO) as folder:
        save_model(folder, saved_config, model.network, model.tokenizer)
        for path in folder.rglob("*.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                if tensor.dtype == torch.float32:
                    tensors[name] = tensor.half()
            save_file(tensors, path, metadata={"format": "pt"})
        shutil.copy(run / "metrics.json", folder)
        write_json(folder / "config.json", {"library_name": "e2e-vl", "e2e_vl_version": e2e_vl.__version__})

        knows = {name: list(values) for name, values in saved_config.data.synthetic.config.scene.values.items()}
        knows["relation"] = list(RELATIONS)
        words = [word for word in model.tokenizer.get_vocab() if word.isalpha() and len(word) > 1]
        knows["word"] = sorted(words)
        examples = copy_scenes(run_config, folder / "images")
        write_json(folder / "about.json", {"knows": knows, "examples": examples})
        e2e_vl.load(folder, "cpu").generate_model_card("demo").save(folder / "README.md")
    size = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    print(f"written: {DEMO} ({size / 1e6:.2f} MB)")


def measure_again() -> None:
    """Measure `MEASURED_AGAIN` of the packaged model on all evaluated splits, and write them into its metrics.json."""
    from e2e_vl.run.build import make_synthetic_data
    from e2e_vl.run.checkpoint import load_saved_config
    from e2e_vl.run.evaluate import evaluate_run
    from e2e_vl.run.metric_names import MetricName

    metrics: dict[str, Any] = read_json(DEMO / "metrics.json")
    with tempfile.TemporaryDirectory() as folder:
        # one training scene is enough: those of other splits do not depend on their number
        settings = [f"data.root={folder}/scenes", "data.synthetic.scenes.train=1"]
        config = load_saved_config(DEMO, settings)
        make_synthetic_data(config)
        for split, boxes in itertools.product(config.data.eval_splits, map(BoxSource, config.eval.boxes)):
            output = Path(folder) / "predictions.json"
            measured, _ = evaluate_run(DEMO, split=split, boxes=boxes, output=output, overrides=settings)
            for metric in MEASURED_AGAIN:
                name = str(MetricName(split, metric, boxes))
                metrics[name] = measured[name]
                print(f"{name}: {metrics[name]}")
    write_json(DEMO / "metrics.json", metrics)
    e2e_vl.load("demo", "cpu").generate_model_card("demo").save(DEMO / "README.md")


def copy_scenes(config: RunConfig, folder: Path, split: str = "test") -> list[dict]:
    """Copy images of a split, and return their names, expressions and the boxes meant, xyxy in pixels."""
    from e2e_vl.run.build import open_split

    folder.mkdir()
    data = open_split(config, split, BoxSource.ONLINE, training=False)
    scenes = []
    for number, group in enumerate(list(data.groups)[:SCENES], start=1):
        sample = data.sample(list(group))
        text_by_family: dict[str, SampleText] = {}  # each about another object
        for text in sample.texts:
            family = text.metadata["family"].split("/")[0] if text.truth.boxes else "nothing"
            boxes_so_far = [earlier.truth.boxes for earlier in text_by_family.values()]
            if family not in text_by_family and text.truth.boxes not in boxes_so_far:
                text_by_family[family] = text

        texts = list(text_by_family.values())
        boxes = [next(iter(text.truth.boxes), None) for text in texts]
        image_file = folder / f"scene_{number:02d}.jpg"
        shutil.copy(sample.images[0].file, image_file)
        scenes.append({"image": f"images/{image_file.name}", "texts": [text.words for text in texts], "boxes": boxes})
    return scenes


if __name__ == "__main__":
    raise SystemExit(main())

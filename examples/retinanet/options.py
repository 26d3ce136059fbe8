"""What does the user want? The command line of train.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_SPLITS = {
    "annotations": ("train", "train-annotations-bbox"),
    "val_annotations": ("validation", "val", "validation-annotations-bbox"),
}
_CLASS_NAMES = ("classes.csv", "class-descriptions-boxable.csv", "classes.txt")


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """The options, with files that were not named looked up in the image folder. Ends with 2 where one is missing."""
    parser = _parser()
    args = parser.parse_args(words)
    for option, stems in _SPLITS.items():
        if getattr(args, option) is None:
            names = [f"{stem}{suffix}" for stem in stems for suffix in (".csv", ".json")]
            setattr(args, option, _first_file(args.local_image_dir, names))
        if getattr(args, option) is None:
            flag = f"--{option.replace('_', '-')}"
            parser.error(f"no {' or '.join(names)} in '{args.local_image_dir}': name the file with {flag}")
    if args.class_names is None and args.annotations.suffix != ".json":
        args.class_names = _first_file(args.local_image_dir, _CLASS_NAMES)
    if args.class_names is not None and args.annotations.suffix == ".json":
        parser.error(f"--class-names has no effect: {args.annotations} names its own categories")
    if args.val_annotations.suffix != args.annotations.suffix:
        parser.error(f"{args.annotations} and {args.val_annotations} are not of the same format")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="RetinaNet (ResNet50-FPN) under DDP: README.md beside this file.")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--local-image-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with the images, searched with its subfolders",
    )
    data.add_argument(
        "--annotations",
        type=Path,
        metavar="FILE",
        help="boxes to train on: OpenImages' .csv or COCO's .json; default: train.csv, train-annotations- "
        "bbox.csv or train.json in the image folder",
    )
    data.add_argument(
        "--val-annotations",
        type=Path,
        metavar="FILE",
        help="boxes to validate on; default: validation.*, val.* or validation-annotations-bbox.csv in the "
        "image folder",
    )
    data.add_argument(
        "--class-names",
        type=Path,
        metavar="FILE",
        help="names of OpenImages' labels (label,name), or a name on each line; default: classes.csv, "
        "class-descriptions-boxable.csv or classes.txt in the image folder",
    )
    data.add_argument("--max-train", type=_positive, metavar="N", help="train on the first N images alone")
    data.add_argument("--max-val", type=_positive, metavar="N", help="validate on the first N images alone")
    data.add_argument(
        "--bad-data",
        choices=("refuse", "skip"),
        default="refuse",
        help="what is done about missing images, boxes outside of their image, unknown classes: refuse to "
        "start, or count and leave out (default: %(default)s)",
    )
    data.add_argument(
        "--cache-dir",
        type=Path,
        default=_default_cache(),
        metavar="DIR",
        help="where resized images are kept (default: %(default)s)",
    )
    data.add_argument(
        "--image-size",
        type=_positive,
        default=800,
        metavar="PIXELS",
        help="the shorter side of the images; the longer one is at most 5/3 of it (default: %(default)s)",
    )
    data.add_argument(
        "--num-workers",
        type=_not_negative,
        metavar="N",
        help="processes that read images, for each rank; default: its CPU cores less one, at most 8",
    )
    train = parser.add_argument_group("training")
    train.add_argument(
        "--batch-size",
        type=_positive,
        default=4,
        metavar="N",
        help="images of a rank in a forward pass (default: %(default)s)",
    )
    train.add_argument(
        "--accum-steps",
        type=_positive,
        default=1,
        metavar="N",
        help="forward passes of an optimizer step (default: %(default)s)",
    )
    train.add_argument("--epochs", type=_positive, default=6, metavar="N", help="(default: %(default)s)")
    train.add_argument(
        "--learning-rate",
        type=_rate,
        default=3e-4,
        metavar="LR",
        help="of AdamW at its peak: warm-up of 20 steps, or 5 %% if that is more, and a cosine to zero "
        "(default: %(default)s)",
    )
    train.add_argument(
        "--weights-path",
        type=Path,
        metavar="FILE",
        help="start from a state dict: torchvision's retinanet_resnet50_fpn or resnet50, or model.pt of an "
        "earlier run; default: random",
    )
    train.add_argument(
        "--backend",
        choices=("cpu", "nccl", "gloo"),
        help="nccl: a GPU for each rank; gloo: gradients go over gloo, from GPUs or CPUs; cpu: no GPUs "
        "(default: nccl where there are GPUs, otherwise cpu)",
    )
    train.add_argument(
        "--precision",
        choices=("auto", "bf16", "float32"),
        default="auto",
        help="bf16: forward pass under autocast; auto: on GPUs that have it (default: %(default)s)",
    )
    train.add_argument("--seed", type=int, default=0)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--debug-freq",
        type=_positive,
        default=10,
        metavar="N",
        help="print and log loss and step times every N steps (default: %(default)s)",
    )
    run.add_argument(
        "--save-steps",
        type=_positive,
        metavar="N",
        help="a checkpoint every N steps, too; always at the end of each epoch",
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from the newest checkpoint of RUN, a run's folder. A run that is started again with "
        "the same --name of `shardtune run` does so by itself; --resume alone says it",
    )
    run.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="where final/ and best/ are written; default: the run's folder"
    )
    return parser


def _first_file(folder: Path, names: list[str] | tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardtune" / "retinanet"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"{text} is no learning rate")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value

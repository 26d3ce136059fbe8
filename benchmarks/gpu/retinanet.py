"""How many images a second does examples/retinanet train on a GPU, and does it wait for data?

python benchmarks/gpu/retinanet.py --out runs/retinanet      # about four minutes on an H200

Each case is a run of `shardtune run` in processes of its own. Images/s and step time are medians of its `profile`
events after the first epoch; "data" is the wait for the loader in all of them over their time. A step is timed from the
end of the step before it, without evaluation and saving. Ratios are to the first case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "retinanet"
CASES = {
    "bf16, 16 images": ["--batch-size", "16"],
    "bf16, 32 images": ["--batch-size", "32"],
    "bf16, 4 images": ["--batch-size", "4"],
    "bf16, 16 images, COCO weights": ["--batch-size", "16", "--weights-path", "{weights}"],
    "float32, 16 images": ["--batch-size", "16", "--precision", "float32"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/retinanet"))
    parser.add_argument("--images", type=int, default=768)
    parser.add_argument("--image-size", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=3, help="2 or more: the first is not counted")
    parser.add_argument("--only", nargs="*", default=list(CASES), help="names of cases")
    args = parser.parse_args()
    out = args.out.absolute()
    data, weights = out / "shapes", out / "coco_shaped.pt"
    size = str(args.image_size)
    words = ["--out", data, "--train", args.images, "--val", 64, "--image-size", size]
    subprocess.run([sys.executable, EXAMPLE / "shapes.py", *map(str, words)], check=True)
    make_weights(weights)
    rows = []
    for name in args.only:
        options = [word.format(weights=weights) for word in CASES[name]]
        rows.append(run(name, out, data, size, args.epochs, options))
        print(json.dumps(rows[-1]), flush=True)
    (out / "retinanet.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    first = rows[0].get("images_per_second")
    print(f"\n{'case':<42}{'images/s':>10}{'ratio':>8}{'step':>10}{'data':>8}{'peak':>11}{'mAP@50':>9}")
    for row in rows:
        if "images_per_second" not in row:
            print(f"{row['case']:<42}  exit code {row['exit_code']}")
            continue
        score = "–" if row["mAP@50"] is None else f"{row['mAP@50']:.3f}"
        ratio = row["images_per_second"] / first if first else float("nan")
        print(
            f"{row['case']:<42}{row['images_per_second']:>10.1f}{ratio:>8.2f}{row['step_seconds'] * 1000:>7.0f} ms"
            f"{row['data_share']:>8.1%}{row['peak_gib']:>7.1f} GiB{score:>9}"
        )


def make_weights(file: Path) -> None:
    """Random numbers under the names of torchvision's COCO weights, whose 91 classes need another head."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from operators import load_operators; load_operators()\n"
        "import torch; from torchvision.models.detection import retinanet_resnet50_fpn\n"
        "from torchvision.ops.misc import FrozenBatchNorm2d\n"
        "model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)\n"
        "torch.save(model.state_dict(), sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", code, EXAMPLE, file], check=True)


def run(name: str, out: Path, data: Path, size: str, epochs: int, options: list[str]) -> dict[str, object]:
    run_name = "".join(c if c.isalnum() else "-" for c in name) + f"-{int(time.time())}"
    command = [
        sys.executable, "-m", "shardtune", "run", "--nproc", "1", "--name", run_name, "-o", f"train.output_dir={out}",
        "--skip-preflight", "--", EXAMPLE / "train.py", "--local-image-dir", data, "--cache-dir", out / "cache",
        "--image-size", size, "--epochs", epochs, *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLE.parent.parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([str(word) for word in command], env=environment, timeout=300)
    if done.returncode:
        return {"case": name, "exit_code": done.returncode}
    lines = (out / run_name / "events-rank0.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    profiles = [event for event in events if event["event"] == "profile"]
    profiles = [profile for profile in profiles if profile["step"] > profiles[-1]["step"] // epochs]
    step = statistics.median(profile["seconds"]["step"] for profile in profiles)
    scores = [event["values"]["val/mAP@50"] for event in events if "val/mAP@50" in event.get("values", {})]
    return {
        "case": name,
        "exit_code": 0,
        "steps": len(profiles),
        "step_seconds": step,
        "data_share": sum(p["seconds"]["data"] for p in profiles) / sum(p["seconds"]["step"] for p in profiles),
        "images_per_second": statistics.median(profile["samples_per_second"] for profile in profiles),
        "peak_gib": max(profile.get("memory", {}).get("peak", 0) for profile in profiles) / 2**30,
        "mAP@50": None if "--weights-path" in options else scores[-1],  # of random numbers in the names of COCO's
    }


if __name__ == "__main__":
    main()

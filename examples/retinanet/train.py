"""Object detection under DDP: torchvision's RetinaNet (ResNet50-FPN) on OpenImages' CSV or COCO's json.

shardtune run --nproc 2 -- examples/retinanet/train.py --local-image-dir data/shapes --image-size 128 --epochs 6

It runs under torchrun and plain Python, too; `shardtune run` adds checkpoints, deadlines, events and a report.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from annotations import Annotations, DataError, ImageFolder
from dataset import (
    DetectionSet,
    StepPlan,
    TrainingBatches,
    collate,
    evaluation_batches,
    read_annotations,
    to_device,
)
from detector import WeightsError, build_model
from evaluation import evaluate
from image_cache import CacheError, ImageCache
from operators import are_compiled
from options import read_options
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from world import BackendError, World, start_world

from shardtune import observe

_STATE = "state.pt"
_WARMUP = 20  # steps, or 5 % of all
_CLIP = 1.0  # of the gradient's norm, which is over 20 in the first steps of a random model


@dataclass
class Progress:
    """What a checkpoint restores beside the model and the optimizer."""

    step: int = 0
    best: float = -1.0
    best_step: int = 0


class Training:
    """One run in one of its ranks."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world = args, world
        train_data, val_data = self._read_data()
        self.classes = train_data.classes
        self.digest = train_data.digest
        cache = ImageCache(args.cache_dir, args.image_size)
        train_data, val_data = self._resize(train_data, cache), self._resize(val_data, cache)
        self.plan = StepPlan(len(train_data.images), args.batch_size, args.accum_steps, world.size, args.seed)
        if not self.plan.steps:
            raise DataError(
                f"{self.plan.images} images are less than the effective batch of {self.plan.effective_batch} "
                f"({args.batch_size} × {args.accum_steps} × {world.size} ranks). Lower --batch-size or --accum-steps."
            )
        self.batches = TrainingBatches(self.plan, world.rank, args.epochs)
        train_set = DetectionSet(train_data.images, cache, augment=True, seed=args.seed)
        self.loader = self._loader(train_set, self.batches)
        val_set = DetectionSet(val_data.images, cache, augment=False)
        self.val_loader = self._loader(
            val_set, evaluation_batches(len(val_set), args.batch_size, world.rank, world.size)
        )
        built = build_model(len(self.classes), args.weights_path, args.image_size)
        self.model = built.model.to(world.device, memory_format=torch.channels_last)
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=args.learning_rate, weight_decay=1e-4)
        self.progress = Progress()
        self.autocast = self._autocast()
        self._resume()
        self._describe(built.source, len(val_set))
        self.ddp: nn.Module = self.model
        if world.control is not None:
            devices = [world.device] if world.device.type == "cuda" else None
            self.ddp = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)
        self._since: list[torch.Tensor] = []  # losses of the batches since the last line

    # --- before the first step ---

    def _read_data(self) -> tuple[Annotations, Annotations]:
        args = self.args
        folder = ImageFolder(args.local_image_dir)
        data = []
        for file, limit in ((args.annotations, args.max_train), (args.val_annotations, args.max_val)):
            classes = data[0].classes if data else None
            annotations, problems = read_annotations(file, folder, args.class_names, classes, limit, args.bad_data)
            self._say_skipped(problems.counts, str(problems))
            data.append(annotations)
        digests = self.world.share(data[0].digest), data[0].digest
        if digests[0] != digests[1]:
            raise DataError(f"Rank {self.world.rank} reads other data from {args.annotations} than rank 0.")
        return data[0], data[1]

    def _say_skipped(self, counts: str, text: str) -> None:
        if counts and self.world.is_main:
            print(f"skipped   {text.removeprefix('Wrong in the data: ')}", flush=True)

    def _resize(self, data: Annotations, cache: ImageCache) -> Annotations:
        """Every image once, whoever does it; then what is missing on this node's own disk."""
        world, images = self.world, [(image.path, image.size) for image in data.images]
        threads = max(1, len(os.sched_getaffinity(0)) // world.local_size)
        unreadable: dict[int, str] = {}
        with observe.phase("resizing images"):
            for share, of in ((world.rank, world.size), (world.local_rank, world.local_size)):
                of_ranks = world.share(world.gather(cache.add_share(images, share, of, threads)))
                for one in of_ranks:
                    unreadable |= one
        if not unreadable:
            return data
        text = "\n".join(f"  {images[number][0]}: {reason}" for number, reason in sorted(unreadable.items())[:10])
        if self.args.bad_data == "refuse":
            raise DataError(
                f"Images that cannot be used: {len(unreadable)}\n{text}\nReplace them, or add --bad-data skip."
            )
        self._say_skipped("images", f"images that cannot be used: {len(unreadable)}\n{text}")
        return replace(data, images=tuple(one for number, one in enumerate(data.images) if number not in unreadable))

    def _loader(self, data: DetectionSet, batches: Any) -> DataLoader[Any]:
        workers = self.args.num_workers
        if workers is None:
            workers = min(8, max(0, len(os.sched_getaffinity(0)) // self.world.local_size - 1))
        return DataLoader(
            data,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=self.world.device.type == "cuda",
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )

    def _autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        is_gpu = self.world.device.type == "cuda"
        wanted = self.args.precision
        if wanted == "bf16" or (wanted == "auto" and is_gpu and torch.cuda.is_bf16_supported()):
            return partial(torch.autocast, self.world.device.type, torch.bfloat16)
        return nullcontext

    def _resume(self) -> None:
        found = observe.load_checkpoint()
        if found is None and self.args.resume:
            found = observe.load_checkpoint(Path(self.args.resume))
            if found is None:
                raise DataError(f"There is no intact checkpoint in '{self.args.resume}' (--resume).")
        if found is None:
            if self.args.resume == "" and self.world.is_main:
                print("resume    no checkpoint in this run's folder: from the start", flush=True)
            return
        step, folder = found
        state = torch.load(folder / _STATE, map_location=self.world.device, weights_only=True)
        for name, now in self._identity().items():
            if state["identity"][name] != now:
                raise DataError(
                    f"{folder} was trained with another {name}: {_short(state['identity'][name])}, now {_short(now)}."
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(step, state["best"], state["best_step"])
        if self.world.is_main:
            print(f"resume    step {step} from {folder}", flush=True)

    def _identity(self) -> dict[str, Any]:
        """What has to be the same in the run that a checkpoint is of: a step number means the same images."""
        return {
            "set of images": self.digest, "effective batch": self.plan.effective_batch, "seed": self.args.seed,
            "number of images": self.plan.images, "image size": self.args.image_size,
        }  # fmt: skip

    def _describe(self, source: str, val_images: int) -> None:
        if not self.world.is_main:
            return
        plan, args = self.plan, self.args
        trained = sum(weight.numel() for weight in self.trained)
        left = plan.images - plan.steps * plan.effective_batch
        ranks = f"{self.world.size} rank{'s' * (self.world.size > 1)}"
        precision = "float32" if self.autocast is nullcontext else "bf16 (autocast)"
        lines = [
            f"data      {plan.images} + {val_images} images, {len(self.classes)} classes, {args.image_size} pixels",
            f"model     RetinaNet ResNet50-FPN, weights: {source}",
            f"          {trained:,} parameters train, {precision}, {self.world.device.type}",
            f"batch     {args.batch_size} per rank × {args.accum_steps} accumulation × {ranks} = "
            f"{plan.effective_batch} images per step",
            f"steps     {plan.steps} per epoch, {self.total_steps} in {args.epochs} epoch{'s' * (args.epochs > 1)}"
            + (f"; {left} other images are left out of each epoch" if left else ""),
        ]
        if not are_compiled():
            lines.append("nms       in plain PyTorch: torchvision's compiled operators do not load beside this torch")
        if observe.run_dir() is None:
            lines.append("note      no checkpoints without `shardtune run`")
        print("\n".join(lines), flush=True)

    # --- the run ---

    @property
    def total_steps(self) -> int:
        return self.plan.steps * self.args.epochs

    def train(self) -> bool:
        """To the end, or until the run is asked to stop; whether it came to its end."""
        self.batches.first_step = self.progress.step
        data = iter(self.loader)  # one for all epochs: the next one is read while this one is evaluated
        first_epoch = max(0, self.progress.step - 1) // self.plan.steps
        for epoch in range(first_epoch, self.args.epochs):
            first_step = self.progress.step - epoch * self.plan.steps  # all of them, where only evaluating is left
            steps = self.plan.steps - first_step
            if steps and not self._train_steps(islice(data, steps * self.args.accum_steps)):
                return False
            self._evaluate(epoch)
        self._write_weights("final")
        return True

    def _train_steps(self, batches: Iterator[Any]) -> bool:
        """Whether it came to their end."""
        args, part = self.args, 0
        self.ddp.train()
        for batch in observe.steps(
            batches, samples=lambda batch: len(batch[0]), unit="images", accumulation=args.accum_steps
        ):
            part += 1
            is_last = part % args.accum_steps == 0
            self._set_learning_rate()
            waits = (
                self.ddp.no_sync() if isinstance(self.ddp, DistributedDataParallel) and not is_last else nullcontext()
            )
            with waits:
                self._backward(batch)
            if not is_last:
                continue
            norm = nn.utils.clip_grad_norm_(self.trained, _CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.progress.step += 1
            if self.progress.step % args.debug_freq == 0 or self.progress.step == self.total_steps:
                self._log(norm)
            stop = observe.stop_requested()
            at_end = self.progress.step % self.plan.steps == 0
            if stop or at_end or (args.save_steps and self.progress.step % args.save_steps == 0):
                self._save()
            if stop:
                self._say(f"stopped   after step {self.progress.step}")
                return False
        return True

    def _backward(self, batch: Any) -> None:
        images, targets = to_device(batch, self.world.device)
        with self.autocast():
            losses = self.ddp(images, targets)
        self._since.append(torch.stack([losses["classification"].detach(), losses["bbox_regression"].detach()]))
        (sum(losses.values()) / self.args.accum_steps).backward()

    def _set_learning_rate(self) -> None:
        """Of the step that is under way: a function of its number, so that a resumed run goes on with the same."""
        warmup = max(_WARMUP, self.total_steps // 20)
        step = self.progress.step
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.total_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * min(1.0, (step + 1) / warmup) * cosine

    def _log(self, norm: torch.Tensor) -> None:
        classification, regression = self.world.mean(torch.stack(self._since).float().mean(0)).tolist()
        self._since = []
        loss = classification + regression
        if not math.isfinite(loss):
            raise FloatingPointError(f"Loss is {loss} at step {self.progress.step}. Lower --learning-rate.")
        rate = self.optimizer.param_groups[0]["lr"]
        if self.world.is_main:
            observe.log(
                loss=loss, **{"loss/classification": classification, "loss/box": regression},
                grad_norm=norm, learning_rate=rate,
            )  # fmt: skip
        profile = observe.profile().partition("  ")[2]
        self._say(
            f"step {self.progress.step}/{self.total_steps}  loss {loss:.4f} (class {classification:.3f}, box "
            f"{regression:.3f})  grad {norm.item():.2f}  lr {rate:.2e}  {profile}".rstrip()
        )

    def _evaluate(self, epoch: int) -> None:
        with observe.phase("evaluating"):
            scores = evaluate(self.model, self.val_loader, self.world, self.autocast)
        if self.world.is_main:
            observe.log(**{f"val/{name}": value for name, value in scores.items()})
        shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
        self._say(f"epoch {epoch + 1}/{self.args.epochs}  {shown}")
        if scores["mAP"] > self.progress.best:
            self.progress = replace(self.progress, best=scores["mAP"], best_step=self.progress.step)
            self._write_weights("best")

    def _save(self) -> None:
        def fill(folder: Path) -> None:
            state = {
                "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "identity": self._identity(), "best": self.progress.best, "best_step": self.progress.best_step,
            }  # fmt: skip
            torch.save(state, folder / _STATE)

        observe.save_checkpoint(fill)

    def _write_weights(self, name: str) -> None:
        """`best/` or `final/`: model.pt, which --weights-path takes, and the names of the classes."""
        home = self.args.output_dir or observe.run_dir()
        if home is None or not self.world.is_main:
            return
        folder = home / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "model.tmp")
        (folder / "model.tmp").replace(folder / "model.pt")
        (folder / "classes.txt").write_text("\n".join(self.classes) + "\n", encoding="utf-8")

    def _say(self, line: str) -> None:
        if self.world.is_main:
            print(line, flush=True)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12]


def main() -> int:
    args = read_options()
    try:
        world = start_world(args.backend)
        Training(args, world).train()
    except (BackendError, CacheError, DataError, WeightsError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if world.control is not None:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Target `merged`: base and adapter in one checkpoint, in the base's own form, for everything that loads the base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import AutoModelForCausalLM

from shardtune.errors import UserInputError
from shardtune.export.answer_end import missing_answer_end
from shardtune.export.base_files import (
    check_tokenizer,
    copy_base_files,
    merged_config,
    write_chat_template,
    write_config,
    write_tokenizer,
)
from shardtune.export.logits_check import LogitsComparison, describe_check
from shardtune.export.merged_tensors import plan_merge
from shardtune.export.request import CardParts, Dtype, Export, ExportLog, ExportRequest, Verification
from shardtune.export.safetensors_writer import check_shards, write_shards
from shardtune.export.samples import samples_for
from shardtune.export.survival import Survival, by_share, together
from shardtune.model.safetensors_headers import FLOAT8
from shardtune.model.stored_names import SCALE
from shardtune.terminal import percent, size

_DTYPES: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHARD_BYTES = 5_000_000_000
_FP8_BAR = 0.9  # below it a layer is not what was trained and evaluated
_WARN_BAR = 0.9
_ALL = 0.9995  # reads 100.0 %
_ENOUGH_TO_REFUSE = 8  # parameters measured: then FP8 is clearly too coarse, and the rest need not be written

_USAGE = """```python
from transformers import AutoTokenizer, {loader}

model = {loader}.from_pretrained("{{folder}}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{{folder}}")
```

```console
$ vllm serve {{folder}}
```"""


def prepare(request: ExportRequest) -> Export:
    """Raises:
    UserInputError: base and adapter do not fit, or the dtype is not to be had.
    """
    return MergedExport(request)


class MergedExport:
    """See `request.Export`."""

    def __init__(self, request: ExportRequest) -> None:
        self.request = request
        self.fp8 = request.dtype == "fp8"
        dtype = _DTYPES.get(request.dtype) if request.dtype is not None else None
        self.merged = plan_merge(request.tuned, dtype, fp8_layout=self.fp8)
        self.base = self.merged.adapted.folder
        check_tokenizer(request.tuned, self.base)
        self.checksums: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.merged.tensors)

    def write(self, folder: Path, log: ExportLog) -> None:
        merged, request = self.merged, self.request
        log.say("merging", f"{len(merged.changes)} parameters change; {len(merged.tensors)} tensors are written")

        measured = _ENOUGH_TO_REFUSE

        def progress(done: int) -> None:
            nonlocal measured
            log.progress(done, self.nbytes)
            if len(merged.survival) > measured:  # the last is half measured
                measured = len(merged.survival)
                self._refuse_lost(list(merged.survival)[:-1])

        with merged:
            self.checksums = write_shards(merged.tensors, folder, request.max_shard_bytes or _SHARD_BYTES, progress)
        self._refuse_lost(list(merged.survival))
        self._report_survival(log)
        copy_base_files(self.base, folder, dequantised=merged.dequantised)
        write_tokenizer(request.tuned, self.base, folder, grown=merged.rows is not None)
        write_chat_template(request.tuned, folder, log)
        config = merged_config(
            self.base, dequantised=merged.dequantised, untied=merged.untied, dtype=merged.dtype, rows=merged.rows
        )
        write_config(config, folder)
        if (end := missing_answer_end(request.tuned, self.base)) is not None:
            end.write(folder, log)
        if not any(any(folder.glob(pattern)) for pattern in ("token*", "tekken.json")):
            log.warn("Neither base nor adapter has a tokenizer: none is written.")

    def verify(self, folder: Path, log: ExportLog) -> Verification:
        log.say("checking", "what is on the disk")
        check_shards(folder, self.merged.tensors, self.checksums, lambda done: log.progress(done, self.nbytes))
        read_back = f"all {len(self.merged.tensors):,} tensors read back as computed"
        survival = together(self.merged.survival)
        figures = {"tensors": len(self.merged.tensors), "surviving_delta": survival.share, "noise": survival.noise}
        rounded_to = {
            tensor.parameter: tensor.torch_dtype
            for tensor in self.merged.tensors
            if tensor.parameter is not None and tensor.dtype != FLOAT8 and not tensor.name.endswith(SCALE)
        }
        comparison = LogitsComparison(self.request.tuned, rounded_to, self.merged.survival, log.progress)
        needed, free = comparison.needs(), comparison.free()
        if free is not None and needed > free:
            log.warn(
                f"The logits were not compared: this needs {size(needed)} of memory, {size(free)} are free. The "
                "written weights were."
            )
            return Verification("weights", read_back, figures)
        log.say("checking", "what each layer and the logits change, against adapter and base")
        samples = samples_for(self.request.tuned, self.base, self.merged.adapted.stored_rows)
        found = comparison.check(folder, samples)
        text, own = describe_check(found)
        return Verification("logits", f"{text}; {read_back}", figures | own)

    def card(self) -> CardParts:
        dtype = {None: "the base's own precision", "bfloat16": "bfloat16", "float16": "float16"}.get(
            self.merged.dtype, "float32"
        )
        return CardParts(
            "transformers",
            _USAGE.format(loader=self._loader()),
            contents=f"The adapter is merged into the weights, in {'FP8, as the base is' if self.fp8 else dtype}.",
        )

    def _loader(self) -> str:
        """The class by whose name transformers loads the base, too."""
        wrapper = self.merged.adapted.meta_model.wrapper
        if wrapper is not None:
            return wrapper.class_name
        model = self.merged.adapted.meta_model.model
        known = type(model.config) in AutoModelForCausalLM._model_mapping  # Mistral 4's is not
        return "AutoModelForCausalLM" if known else type(model).__name__

    def _bar(self) -> float:
        if self.request.min_surviving_delta is not None:
            return self.request.min_surviving_delta
        return _FP8_BAR if self.fp8 else 0.0

    def _refuse_lost(self, measured: list[str]) -> None:
        parts = {name: self.merged.survival[name] for name in measured}
        lost = [(name, part) for name, part in by_share(parts) if part.share < self._bar()]
        if not lost:
            return
        name, part = lost[0]
        raise UserInputError(
            f"Rounding to {'FP8' if self.fp8 else 'this dtype'} would undo the fine-tuning: in {len(lost)} of "
            f"{len(parts)} changed parameters measured, less than {percent(self._bar())} of the change survives "
            f"({_listed(dict(lost))}).",
            why=f"A change is small against the steps between neighbouring values: of {name}, {percent(part.share)} is "
            "left. The logits would look right, because they are nearly those of the base.",
            fix="Export in bf16 (leave --dtype out), or serve the adapter on the base (--to vllm)."
            if self.fp8
            else "Export with --dtype fp32, or lower --min-surviving-delta.",
        )

    def _report_survival(self, log: ExportLog) -> None:
        parts = self.merged.survival
        ordered = by_share(parts)
        if not ordered:
            log.warn("The adapter changes nothing: the merged model is the base.")
            return
        whole, median = together(parts), ordered[len(ordered) // 2][1]
        text = f"{percent(whole.share)} of the change survives"
        if ordered[0][1].share < _ALL:
            text += f"; median parameter {percent(median.share)}, worst: {_listed(dict(ordered[:3]))}"
        log.say("rounding", f"{text} (rounding errors: {percent(whole.noise)} of its size)")
        lost = [name for name, part in ordered if part.share < _WARN_BAR]
        if lost:
            where = "FP8. --dtype bf16 keeps more of it" if self.fp8 else "this dtype. --dtype fp32 keeps all of it"
            log.warn(
                f"{len(lost)} of {len(ordered)} changed parameters keep less than {percent(_WARN_BAR)} of their change "
                f"in {where}, in twice the space."
            )


def _listed(parts: Mapping[str, Survival], most: int = 3) -> str:
    return ", ".join(f"{name} {percent(part.share)}" for name, part in list(parts.items())[:most])

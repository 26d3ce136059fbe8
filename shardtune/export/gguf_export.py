"""Target `gguf`: the merged model in one file for llama.cpp and what builds on it, read back before it is published."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shardtune import terminal
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.export.answer_end import end_of_turn
from shardtune.export.base_files import copy_licences, trained_template
from shardtune.export.merged_tensors import main_dtype, plan_merge
from shardtune.export.request import CardParts, Export, ExportLog, ExportRequest, Verification
from shardtune.export.survival import by_share, together
from shardtune.inference.load import load_tuned_tokenizer
from shardtune.machine import free_memory
from shardtune.model.safetensors_headers import read_headers
from shardtune.terminal import percent

_BAR = 0.9  # of the fine-tuning, in every parameter and in the logits, where weights are quantised
_OFF = 0.2  # how far the share of the logits' change may be from that of the weights'
# How far rounded weights may move logits, relative to their size. A wrong layout moves them by all of it.
_APART = {"fp32": 0.01, "16 bits": 0.1, "quantised": 0.5}


def prepare(request: ExportRequest) -> Export:
    """Raises:
    UserInputError: the model or its tokenizer is not known to llama.cpp as it is.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserInputError("--to gguf needs the package gguf.", why="It is not installed.", fix="pip install gguf")
    return GgufExport(request)


@dataclass(frozen=True)
class _Bars:
    share: float
    apart: float


class GgufExport:
    """See `request.Export`."""

    def __init__(self, request: ExportRequest) -> None:
        from shardtune.export.gguf_file import PLAIN, QUANTIZED, file_type
        from shardtune.export.gguf_models import gguf_model
        from shardtune.export.gguf_tensors import plan_tensors
        from shardtune.export.gguf_tokenizer import gguf_tokenizer

        self.request = request
        merged = plan_merge(request.tuned, "float32")
        meta_model = merged.adapted.meta_model
        self.folder = merged.adapted.folder
        self.config = meta_model.model.config
        self.model = gguf_model(self.config)
        main = file_type(request.dtype, request.quantization, main_dtype(read_headers(self.folder)))
        self.wrapper = meta_model.wrapper
        self.plan = plan_tensors(merged, self.model, main)
        self.rows = next(t.shape[0] for t in self.plan.tensors if t.name == "token_embd.weight")
        self.tokenizer = load_tuned_tokenizer(request.tuned, self.folder)
        self.stated = gguf_tokenizer(self.tokenizer, self.rows)
        self.quantized = main in QUANTIZED.values()
        self.whole = (
            [tensor.name for tensor in self.plan.tensors if tensor.type == PLAIN["fp16"]] if self.quantized else []
        )
        if self.quantized and not any(tensor.type == main for tensor in self.plan.tensors):
            raise UserInputError(
                f"--quantization {request.quantization} has no effect on this model.",
                why="None of its matrices has rows of a multiple of 32 values, which share a scale.",
                fix="Leave it out.",
            )
        self.checksums: dict[str, int] = {}
        share = _BAR if self.quantized else 0.0
        if request.min_surviving_delta is not None:
            share = request.min_surviving_delta
        kind = "quantised" if self.quantized else "fp32" if main == PLAIN["fp32"] else "16 bits"
        self.bars = _Bars(share, _APART[kind])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.plan.tensors)

    @property
    def file_name(self) -> str:
        name = re.sub(r"[^A-Za-z0-9._]+", "-", self.request.tuned.name).strip("-") or "model"
        return f"{name}-{self.plan.main.name}.gguf"

    def write(self, folder: Path, log: ExportLog) -> None:
        from shardtune.export.gguf_file import write_file
        from shardtune.export.gguf_models import keys_of, settings

        if self.wrapper is not None:
            log.warn(f"{self.wrapper.class_name}: the text model alone is written; the file has no vision part.")
        changes = len(self.plan.merged.changes)
        log.say("merging", f"{changes} parameters change; {len(self.plan.tensors)} tensors are written")
        if self.whole:
            log.warn(
                f"{len(self.whole)} matrices are float16, such as {self.whole[0]}: the length of their rows is not a "
                f"multiple of 32, as {self.plan.main.name} needs it."
            )
        self._state_chat(log)
        stated = dict(keys_of(settings(self.config, self.model, self.rows), self.model.arch))
        with self.plan.merged:
            self.checksums = write_file(
                folder / self.file_name,
                self.model.arch,
                self.request.tuned.name,
                stated,
                self.stated,
                self.plan.tensors,
                self.plan.main,
                lambda done: log.progress(done, self.nbytes),
            )
        copy_licences(self.folder, folder)
        self._report_rounding(log)

    def _state_chat(self, log: ExportLog) -> None:
        """How a conversation was written in training, and the token at which its answers ended."""
        template = trained_template(self.request.tuned, log)
        if template is not None:
            self.stated = replace(self.stated, chat_template=template)
        token, number = end_of_turn(self.request.tuned, self.folder)
        if number is not None and number != self.stated.ids.get("eos"):
            self.stated = replace(self.stated, ids={**self.stated.ids, "turn": number})
            log.say("answers", f"end at {token} (id {number}), as in training")

    def verify(self, folder: Path, log: ExportLog) -> Verification:
        from shardtune.export.gguf_file import check_file
        from shardtune.export.gguf_reading import check_tokenizer, compare_logits

        path = folder / self.file_name
        log.say("checking", "reading the file back")
        fields = check_file(path, self.plan.tensors, self.checksums).fields
        tokens = check_tokenizer(path, fields, self.stated, self.tokenizer)
        survives = together(self.plan.survival).share
        figures = {"tensors": len(self.plan.tensors), "tokenizer_tokens": tokens, "surviving_delta": survives}
        read = f"{len(self.plan.tensors)} tensors and the tokenizer read back"
        needed = 4 * 2 * sum(p.numel() for p in self.plan.merged.adapted.model.parameters())  # two of them, float32
        free = free_memory()
        if free is not None and needed > free:
            log.warn(
                f"Its answers were not compared: two copies in float32 take {terminal.size(needed)}, and this machine "
                f"has {terminal.size(free)} free. Tensors, their layout by name and the tokenizer were."
            )
            return Verification("weights", read, figures)
        answers = compare_logits(path, self.plan, self.request.tuned)
        figures |= {"logits_share": answers.share, "logits_error": answers.error, "logits_apart": answers.apart}
        if not answers.apart <= self.bars.apart:
            raise ShardtuneError(
                f"The GGUF file does not compute what adapter and base do: its logits differ by "
                f"{percent(answers.apart)} of their size.",
                why=f"{self.plan.main.name} weights move them by less than {percent(self.bars.apart)}.",
                fix="Export merged weights (--to merged), and please report this with the model's config.json."
                if not self.quantized
                else "Use a finer --quantization (q8_0), or none.",
            )
        if answers.share < self.bars.share:
            raise self._lost(f"of its effect on the logits, {percent(answers.share)} is left")
        if abs(answers.share - survives) > _OFF:
            raise ShardtuneError(
                f"The GGUF file does not change the logits as the adapter does: by {percent(answers.share)} of it.",
                why=f"In its weights {percent(survives)} of the change is left.",
                fix="Export merged weights (--to merged), and please report this with the model's config.json.",
            )
        text = (
            f"{read}; the file reproduces {percent(answers.share)} of the adapter's effect on the logits "
            f"(error {percent(answers.error)} of its size; {answers.source}; read by transformers)"
        )
        return Verification("logits", text, figures)

    def card(self) -> CardParts:
        name = self.file_name
        usage = f"```bash\nllama-cli -m {{folder}}/{name}\nllama-server -m {{folder}}/{name}\n```"
        contents = (
            f"One GGUF file (`{self.model.arch}`, {self.plan.main.name}) with the adapter merged into its weights."
        )
        return CardParts("gguf", usage, ("gguf", "llama.cpp"), contents)

    def _report_rounding(self, log: ExportLog) -> None:
        parts = by_share(self.plan.survival)
        if not parts:
            return
        whole, (name, worst) = together(self.plan.survival), parts[0]
        log.say(
            "rounding",
            f"{percent(whole.share)} of the change survives in {self.plan.main.name} (worst {name}, "
            f"{percent(worst.share)}); rounding errors are {percent(whole.noise)} of its size",
        )
        if worst.share < self.bars.share:
            raise self._lost(f"of the change of {name}, {percent(worst.share)} is left")
        if worst.share < _BAR:
            log.warn(
                f"{sum(part.share < _BAR for _, part in parts)} of {len(parts)} changed parameters keep less than "
                f"{percent(_BAR)} of their change in {self.plan.main.name}. --dtype fp32 keeps all of it."
            )

    def _lost(self, what: str) -> UserInputError:
        return UserInputError(
            f"Writing {self.plan.main.name} weights would undo too much of the fine-tuning: {what}.",
            why=f"Its changes are small against the steps between values of that type; the bar is "
            f"{percent(self.bars.share)}.",
            fix="Use a finer type (--quantization q8_0, --dtype bf16 or fp32), or lower --min-surviving-delta.",
        )

"""How is a GGUF file written that does not fit into memory? Header and metadata first, then each tensor row by row."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import Tensor

from shardtune.errors import ShardtuneError, UserInputError

if TYPE_CHECKING:
    from shardtune.export.gguf_tokenizer import GgufTokenizer

Type = gguf.GGMLQuantizationType
_BLOCK = 32  # values that share a scale in every type that is offered
PLAIN = {"fp32": Type.F32, "fp16": Type.F16, "bf16": Type.BF16}
QUANTIZED = {"q8_0": Type.Q8_0, "q5_1": Type.Q5_1, "q5_0": Type.Q5_0, "q4_1": Type.Q4_1, "q4_0": Type.Q4_0}
_FILE_TYPES = {
    Type.F32: "ALL_F32", Type.F16: "MOSTLY_F16", Type.BF16: "MOSTLY_BF16", Type.Q8_0: "MOSTLY_Q8_0",
    Type.Q5_1: "MOSTLY_Q5_1", Type.Q5_0: "MOSTLY_Q5_0", Type.Q4_1: "MOSTLY_Q4_1", Type.Q4_0: "MOSTLY_Q4_0",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
        shape: As torch has it; the file states it in reverse.
        blocks: Its rows in order, in float32, some at a time: (rows, columns), or all of a vector.
    """

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // int(block) * int(size)


def type_of(name: str, shape: Sequence[int], main: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Vectors, norms and routers stay float32, as llama.cpp wants them; embedding and head keep 8 bits at least."""
    if len(shape) < 2 or "ffn_gate_inp" in name or main == Type.F32:
        return Type.F32
    if main not in QUANTIZED.values():
        return main
    if shape[-1] % _BLOCK:
        return Type.F16
    return Type.Q8_0 if name in ("token_embd.weight", "output.weight") else main


def encode(rows: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of float32 as they are written."""
    if kind == Type.BF16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return np.asarray(gguf.quants.quantize(np.ascontiguousarray(rows.numpy()), kind))


def decode(written: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
    """What a reader makes of it, in float32."""
    if kind == Type.BF16:
        return torch.from_numpy(written.copy()).view(torch.bfloat16).float()
    return torch.from_numpy(np.array(gguf.quants.dequantize(written, kind), dtype=np.float32))


def rounded(rows: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    return decode(encode(rows, kind), kind)


def write_file(
    path: Path,
    arch: str,
    name: str,
    settings: Mapping[str, int | float],
    tokenizer: GgufTokenizer,
    tensors: Sequence[GgufTensor],
    main: gguf.GGMLQuantizationType,
    progress: Callable[[int], None],
) -> dict[str, int]:
    """Returns the checksum of each tensor's bytes, as they were handed to the system."""
    writer = gguf.GGUFWriter(None, arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(int(getattr(gguf.LlamaFileType, _FILE_TYPES[main])))
    if main in QUANTIZED.values():
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in settings.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    _add_tokenizer(writer, tokenizer)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    checksums, done = {}, 0
    with path.open("ab") as file:
        for tensor in tensors:
            _pad(file)
            checksum, written = 0, 0
            for rows in tensor.blocks():
                content = encode(rows, tensor.type).tobytes()
                checksum, written = zlib.crc32(content, checksum), written + len(content)
                file.write(content)
                progress(done + written)
            if written != tensor.nbytes:
                raise ShardtuneError(
                    f"{tensor.name} has {written} bytes, not {tensor.nbytes}.", fix="Please report it."
                )
            checksums[tensor.name], done = checksum, done + written
        _pad(file)
    return checksums


def check_file(path: Path, tensors: Sequence[GgufTensor], checksums: Mapping[str, int]) -> gguf.GGUFReader:
    """Raises:
    ShardtuneError: a tensor's bytes, type or shape are not those that were computed.
    """
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in tensors:
        one = found.pop(tensor.name, None)
        shape = tuple(int(size) for size in reversed(one.shape)) if one is not None else ()
        content = np.ascontiguousarray(one.data).data if one is not None else b""
        if one is None or shape != tensor.shape or one.tensor_type != tensor.type:
            raise damaged(f"{tensor.name} is {shape}")
        if zlib.crc32(content) != checksums[tensor.name]:
            raise damaged(f"{tensor.name} has other bytes")
    if found:
        raise damaged(f"it has {len(found)} more tensors")
    return reader


def damaged(what: str) -> ShardtuneError:
    return ShardtuneError(
        f"The GGUF file is not what was written: {what}.",
        why="It was read back before it was published; nothing was.",
        fix="Check the disk, and export again.",
    )


def file_type(dtype: str | None, quantization: str | None, base: str) -> gguf.GGMLQuantizationType:
    """What weights are written in.

    Args:
        base: torch's name of what the base holds its weights in.

    Raises:
        UserInputError: it is not to be had.
    """
    if quantization is not None:
        if dtype is not None:
            raise UserInputError("--dtype and --quantization cannot be combined.", fix="Give one of them.")
        if quantization.lower() not in QUANTIZED:
            raise UserInputError(
                f"--quantization {quantization} is not written here.",
                why=f"Types that can be: {', '.join(QUANTIZED)}. K- and I-quants need llama.cpp's own quantiser.",
                fix="Leave it out, and run llama-quantize on the file.",
            )
        return QUANTIZED[quantization.lower()]
    if dtype == "fp8":
        raise UserInputError("--dtype fp8: GGUF has no FP8 weights.", fix="Use --quantization q8_0.")
    names = {"float32": "fp32", "float16": "fp16"}
    return PLAIN[dtype or names.get(base, "bf16")]


def _add_tokenizer(writer: Any, tokenizer: GgufTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    setters = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "unknown": writer.add_unk_token_id,
               "padding": writer.add_pad_token_id, "turn": writer.add_eot_token_id}  # fmt: skip
    for name, index in tokenizer.ids.items():
        setters[name](index)
    writer.add_add_bos_token(tokenizer.add["bos"])
    writer.add_add_eos_token(tokenizer.add["eos"])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _pad(file: Any) -> None:
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))

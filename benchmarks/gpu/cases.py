"""What is measured? Models at their real size without weights, and rows of random tokens, as folders on a disk."""

from __future__ import annotations

import json
import random
from pathlib import Path

DENSE_7B = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "dtype": "bfloat16", "pad_token_id": 1,
}  # fmt: skip


def mistral4(layers: int) -> dict[str, object]:
    """Mistral Small 4 (119B with 36 layers), as transformers' own default config describes it."""
    from transformers import Mistral4Config

    config: dict[str, object] = Mistral4Config(num_hidden_layers=layers, pad_token_id=1).to_dict()
    return {**config, "architectures": ["Mistral4ForCausalLM"], "dtype": "bfloat16"}


def write_model(folder: Path, config: dict[str, object]) -> Path:
    """A folder with config.json and a tokenizer whose words are the numbers of its tokens; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"<unk>": 0, "<pad>": 1, "</s>": 2} | {str(n): n for n in range(3, int(str(config["vocab_size"])))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def write_rows(file: Path, *, rows: int, length: int, short: bool, vocabulary: int) -> Path:
    """Rows of `length` tokens, or short ones as instructions are: log-normal, median 180 tokens."""
    rng = random.Random(0)
    with file.open("w") as out:
        for _ in range(rows):
            # One token is the end of text that is put behind every row.
            n = max(16, min(length, round(rng.lognormvariate(5.2, 0.8)))) if short else length
            out.write(
                json.dumps({"text": " ".join(str(rng.randrange(10, vocabulary - 1)) for _ in range(n - 1))}) + "\n"
            )
    return file

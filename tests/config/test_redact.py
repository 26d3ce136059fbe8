"""No secret is written down, wherever it stands in a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import load_config, render_yaml
from shardtune.config.redact import hide_text, hide_values, is_secret, redacted, redacted_settings

SECRET = "hunter2-very-secret"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model_name_or_path: m}\n"
        f"data: {{dataset_name_or_path: 's3://me:{SECRET}@host/rows.jsonl'}}\n"
        f"cluster: {{env: {{WANDB_API_KEY: {SECRET}, HF_TOKEN: {SECRET}, AWS_SECRET_ACCESS_KEY: '${{HUB}}', "
        "PLAIN: kept, NOTE: hf_abcdefghijklmnopqrst}}\n"
    )
    return path


def test_a_secret_is_in_no_kept_config_and_everything_else_is(config: Path) -> None:
    resolved = load_config(config, [f"cluster.env.DB_PASSWORD={SECRET}"], environ={"HUB": SECRET})
    assert resolved.config.cluster.env["AWS_SECRET_ACCESS_KEY"] == SECRET  # the run itself has it
    for text in (render_yaml(redacted(resolved)), str(redacted_settings(resolved.config))):
        assert SECRET not in text and "hf_abcdefghij" not in text
        assert "PLAIN" in text and "kept" in text and "host/rows.jsonl" in text
    assert "DB_PASSWORD" in render_yaml(redacted(resolved))
    typed = f"shardtune train run.yaml -o 'cluster.env={{DB_PASSWORD: {SECRET}, PLAIN: kept}}'"  # a name inside a value
    assert hide_values(typed, resolved.config) == typed.replace(SECRET, "***")


@pytest.mark.parametrize("name", ["HF_TOKEN", "hub_token", "token", "OPENAI_API_KEY", "apikey", "PGPASSWORD_FILE.password",
                                  "aws_secret_access_key", "client_secret", "Authorization", "private_key"])  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["pad_token", "eos_token", "max_tokens", "tokenizer_name_or_path", "num_tokens",
                                  "author", "keyboard", "token_ids", "secretary"])  # fmt: skip
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [("https://u:p4ss@h/x", "https://***@h/x"), ("https://h/x?sig=abc&v=1", "https://h/x?***&v=1"),
     ("s3://bucket/user@host", "s3://bucket/user@host"), ("key sk-abcdefghijklmnop1234", "key ***"),
     ("a plain sentence", "a plain sentence")],
)  # fmt: skip
def test_values_that_look_like_secrets(text: str, hidden: str) -> None:
    assert hide_text(text) == hidden

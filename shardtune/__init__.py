"""shardtune: fine-tune large language models with LoRA on sharded GPUs, from one YAML."""

__version__ = "0.2.0"

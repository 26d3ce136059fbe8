"""How does lm-evaluation-harness ask our loaded model? Its own model class around base and adapter as they are held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval.models.huggingface import HFLM

if TYPE_CHECKING:
    import torch

    from shardtune.inference.load import LoadedModel


class _PlainModel:
    """The loaded model, and not a torch module: of those the harness ties the weights, which would undo trained heads.

    Which side answers is up to `LoadedModel.side` around the calls.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.config = loaded.model.get_base_model().config
        self.device: torch.device = loaded.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def generate(self, **kwargs: Any) -> Any:
        return self._model.generate(**kwargs)


class _HarnessModel(HFLM):
    def get_model_info(self) -> dict[str, Any]:
        """Nothing: it would ask the Hub for the model's commit."""
        return {}


def harness_model(loaded: LoadedModel, batch_size: int) -> Any:
    """One copy of the weights for both sides; FP8 bases and expert adapters compute as they do elsewhere."""
    return _HarnessModel(
        pretrained=_PlainModel(loaded), tokenizer=loaded.tokenizer, backend="causal", batch_size=batch_size
    )

"""Linear layers of a served model on weights packed once (see `ddtree.cpu_linear`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ddtree.cpu_linear import can_pack, pack_weight, packed_linear


def _apply(layer: Any, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # A weight update writes in place; then the packed copy is stale and is made again.
    if layer.packed_version != layer.weight._version:
        layer.packed = pack_weight(layer.weight)
        layer.packed_version = layer.weight._version
    return packed_linear(inputs.to(layer.weight.dtype), layer.packed, bias)


class PackedLinearMethod(UnquantizedLinearMethod):
    """An unquantised linear layer, multiplied with its packed weight."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _apply(layer, x, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """An unquantised output head, multiplied with its packed weight; looks up as before."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _apply(layer, x, bias)


def pack_model(model: Any) -> None:
    """Pack every unquantised linear layer and the output head of a loaded model, in place."""
    head = getattr(model, "lm_head", None)
    packed = []
    for layer in model.modules():
        method: Any
        if isinstance(layer, LinearBase):
            plain, method = UnquantizedLinearMethod, PackedLinearMethod
        elif layer is head and isinstance(layer, VocabParallelEmbedding):
            plain, method = UnquantizedEmbeddingMethod, PackedHeadMethod
        else:
            continue
        if type(layer.quant_method) is plain and can_pack(layer.weight):
            layer.quant_method = method()
            layer.packed_version = -1
            packed.append(layer)
    _repack_after_loading(model, packed)


def _repack_after_loading(model: Any, layers: list[Any]) -> None:
    """SGLang's weight loaders write through `.data`, which leaves a weight's version as it was."""
    load_weights = model.load_weights

    def load_and_repack(*args: Any, **kwargs: Any) -> Any:
        loaded = load_weights(*args, **kwargs)
        for layer in layers:
            layer.packed_version = -1
        return loaded

    model.load_weights = load_and_repack

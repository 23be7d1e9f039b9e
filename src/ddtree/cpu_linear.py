"""Linear layers with weights packed once for CPU inference.

A verify forward multiplies each weight by a few dozen rows. The general matrix product lays the
weight out anew on every call, which costs as much as the product itself at that size; oneDNN
accepts a weight that was laid out beforehand. Plain decoding (one row) gains a little, trees gain
most. Measured in `benchmarks/cpu_linear.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Rows the layout is chosen for: a typical tree. Measured to be no worse at 1 and at 64 rows.
_ROWS = 32


def can_pack(weight: Tensor) -> bool:
    """Whether torch can pack such a weight here.

    float32 on any CPU that oneDNN serves, bfloat16 where the CPU multiplies it.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """The packed form of [out, in]; an opaque tensor for `packed_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def packed_linear(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``inputs @ weight.T + bias`` for [..., in] and a weight from `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")


class PackedLinear(nn.Linear):
    """A frozen `nn.Linear` that multiplies with a packed copy of its weight."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return packed_linear(input, self.packed, self.bias)


def pack_linears(module: nn.Module) -> int:
    """Pack every linear layer of a module that will not be trained, in place.

    The plain weights stay, for tied embeddings and for saving, so the layers' memory doubles.

    Returns:
        The number of layers packed; 0 on other devices and dtypes.
    """
    count = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and can_pack(layer.weight):
            layer.__class__ = PackedLinear
            layer.packed = pack_weight(layer.weight)
            layer.requires_grad_(False)
            count += 1
    return count

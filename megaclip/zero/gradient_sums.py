"""Sums of parameter gradients over chunks, in a wider dtype than the parameters' own.

Autograd accumulates gradients in the parameters' own dtype. In bfloat16 a chunk's gradient is lost if the sum is 2^8
times as large.
"""

import torch
from torch import Tensor, nn

from megaclip.zero.parameters import is_partitioned


class GradientSums:
    """Sums in `dtype` of the gradients of all parameters of another dtype.

    Between chunks `parameter.grad` is None, so autograd stores its tensor there and adds nothing. A parameter that
    ZeRO-3 has partitioned accepts no other tensor as gradient than the one that autograd made. There the tensor stays
    and is set to zero.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.dtype != dtype]
        self._partitioned = any(is_partitioned(parameter) for parameter in self._parameters)
        self._dtype = dtype
        self._sums: dict[Tensor, Tensor] = {}

    def add(self) -> None:
        """Add a chunk's gradients to the sums, and remove them from the parameters."""
        gradients = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        new = [parameter for parameter in gradients if parameter not in self._sums]
        self._sums |= {parameter: torch.zeros_like(gradients[parameter], dtype=self._dtype) for parameter in new}
        if not gradients:
            return
        torch._foreach_add_([self._sums[parameter] for parameter in gradients], list(gradients.values()))
        if self._partitioned:
            torch._foreach_zero_(list(gradients.values()))
        else:
            for parameter in gradients:
                parameter.grad = None

    def write_back(self) -> None:
        """Set the parameters' gradients to the rounded sums."""
        while self._sums:
            parameter, total = self._sums.popitem()
            if self._partitioned:
                assert parameter.grad is not None, "gradients are reduced after the last chunk"
                parameter.grad.copy_(total)
            else:
                parameter.grad = total.to(parameter.dtype)

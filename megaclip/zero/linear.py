"""Linear layers whose parameters ZeRO-3 partitions.

PyTorch's linear function keeps a view of the weight for the backward pass. The view would keep the whole weight in
memory, which ZeRO-3 frees after the module's forward pass. DeepSpeed therefore replaces `torch.nn.functional.linear` in
the whole process by a function that keeps the parameter itself (deepspeed/runtime/zero/linear.py). That function has
two costs. It adds the bias of a batch of sequences in a separate kernel. And the number that DeepSpeed assigns to each
parameter becomes a condition of compiled code, so that PyTorch 2.11 compiles every block again. `linear` has neither
cost.
"""

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as DeepSpeedInit
from torch import Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias; autograd keeps the parameters themselves. (.., I), (O, I), (O,) -> (.., O)."""
    if torch.compiler.is_compiling():  # compiled code keeps parameters, not views of them
        return DeepSpeedInit.linear_bk(input, weight, bias)  # PyTorch's own function
    if input.dim() < 3:
        return zero3_linear_wrap(input, weight, bias)
    rows = zero3_linear_wrap(input.flatten(0, -2), weight, bias)  # the product of two matrices adds the bias too
    return rows.unflatten(0, input.shape[:-1])


def use_linear_of_zero3() -> None:
    """Make the linear layers of this process use `linear` instead of DeepSpeed's function."""
    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = linear

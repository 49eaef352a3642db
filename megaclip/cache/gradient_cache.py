"""`GradientCache`: the gradient of any loss over the whole batch, for any encoders and engines.

Scale. Data-parallel engines average parameter gradients over the W ranks. A loss must therefore return gradients of its
features that are W times those of the global mean loss, and the whole gradients of its scale and bias on every rank, as
`megaclip.ClipLoss` does. A loss over the features of one rank alone is then averaged over ranks, as in a plain step.

Shapes: n samples of this rank, D embedding.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megaclip.cache.engines import modules_of, partitions_parameters, passes_of
from megaclip.cache.inputs import Chunks, divided, elements_of
from megaclip.cache.kept_graphs import GraphBudget
from megaclip.cache.passes import Outputs, Passes, Role, restored
from megaclip.comm.collectives import average_over_ranks, gather_integers, raise_on_all_ranks
from megaclip.comm.groups import resolve
from megaclip.errors import ConfigError, DataError
from megaclip.zero.backward import loss_scale_of

_PLACES = 16
"""Integers that ranks exchange about their chunks. A second exchange follows if they are too few."""
_MICRO_STEPS: WeakKeyDictionary[DeepSpeedEngine, int] = WeakKeyDictionary()
"""DeepSpeed's count of calls of `engine.step()` at the last step of any cache of an engine."""


@dataclass(frozen=True)
class Encoded:
    """An input of the loss that an encoder computes from chunks of its inputs.

    Exactly one of `chunk`, `tokens` and `split` divides the inputs. Without them the inputs are one chunk, whose graph
    is kept.
    """

    encoder: Callable[..., Tensor]
    """Function of the inputs of one chunk, which returns features (n, D). With DeepSpeed and FSDP2 it must call the
    engine itself, not a method of its module. Without inputs it is called once without arguments, and may return any
    tensor, such as a scale whose parameter is partitioned."""
    inputs: Any = None
    """Tensors with one row per sample, lists of samples, or a mapping, dataclass or tuple of these."""
    chunk: int | None = None
    """Number of samples per chunk."""
    tokens: int | None = None
    """Number of tokens per chunk, padding included. Samples are sorted by length, and padding at the end is cut.
    Inputs must have an attention_mask (samples, length). A longer sample is a chunk of its own."""
    split: Callable[[Any], list[Any]] | None = None
    """Function that returns the inputs of each chunk, in the order of the samples."""

    def __post_init__(self) -> None:
        if self.divisors() > 1:
            raise ConfigError("Encoded takes one of chunk, tokens and split; leave out the others")
        for name in ("chunk", "tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"Encoded(..., {name}={value!r}): {name} must be a positive integer")

    def divisors(self) -> int:
        return sum(value is not None for value in (self.chunk, self.tokens, self.split))


class GradientCache:
    """Compute gradients of a whole batch in chunks, with one reduction of parameter gradients per step.

    Args:
        loss: function of whole-batch features (n, D) of this rank and other arguments, which returns a scalar tensor.
            Gradients of its own parameters accumulate in these parameters. Those that are not part of the engine are
            averaged over ranks.
        engine: a DeepSpeed engine, a module wrapped by DistributedDataParallel or `fully_shard`, or a list of such
            modules. None: PyTorch without ranks.
        keep: number of chunks whose graphs are kept from their first encoding, which saves their second one: an
            integer, "all", or "auto". "auto" keeps as many as fit into the memory that is free after two steps. On a
            CPU it keeps none.
        scaler: the `torch.amp.GradScaler` of float16 autocast, or None. Gradients are left scaled, as after
            `scaler.scale(loss).backward()`; the returned loss is not scaled. DeepSpeed has its own.
        group: the ranks that train together. None: all ranks.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        engine: Any = None,
        *,
        keep: int | str = "auto",
        scaler: torch.amp.GradScaler | None = None,
        group: Any = None,
    ) -> None:
        if not (keep in ("auto", "all") or (isinstance(keep, int) and keep >= 0)):
            raise ConfigError(f'keep={keep!r}: use "auto", "all", or the number of chunks whose graphs are kept')
        self._loss, self._scaler, self._group = loss, scaler, group
        self._modules = modules_of(engine)
        self._engine = passes_of(self._modules)
        self.gathers_parameters = any(partitions_parameters(module) for module in self._modules)
        self._kept = GraphBudget(keep)
        self._encoders: list[Callable[..., Tensor]] = []
        self._last_built_graph = False
        self._forwards = 0
        """Number of forward passes of DeepSpeed's engine."""
        self._deepspeed = [module for module in self._modules if isinstance(module, DeepSpeedEngine)]
        for engine in self._deepspeed:
            engine.register_forward_pre_hook(self._count_forward)

    def step(self, *arguments: Any, **named: Any) -> Tensor:
        """Leave the gradients of `loss(*arguments, **named)` where the engine's own backward pass would leave them.

        All ranks call it together. `Encoded` arguments are replaced by features. Tensors that require gradients, such
        as a scale, receive theirs. All other arguments reach the loss unchanged. The chunks run under the caller's
        autocast. The gradients are not set to zero before.

        Returns:
            the loss of this rank, (), without a graph.

        Raises:
            DataError: on every rank, if the inputs of a rank cannot be divided into chunks, or ranks pass different
                numbers of `Encoded` arguments.
            MegaclipError: an encoder has failed on another rank before the loss. With FSDP2 and ZeRO-3, whose forward
                passes communicate, only that rank raises, as in a plain step. So it does after the loss.
            ConfigError: an argument cannot be used with the engine.
        """
        values: dict[Any, Any] = dict(enumerate(arguments)) | named
        encoded = {key: value for key, value in values.items() if isinstance(value, Encoded)}
        self._last_built_graph = False
        self._encoders = [value.encoder for value in encoded.values()]
        self._check_engines()
        sources = self._sources(list(encoded.values()))
        passes = Passes(sources, self._engine)
        with nullcontext() if self.gathers_parameters else raise_on_all_ranks(group=self._group):
            passes.encode()
        leaves = {key: source.features() for key, source in zip(encoded, sources, strict=True)}
        others = {key: value for key, value in values.items() if key not in leaves and isinstance(value, Tensor)}
        joined = {key: value for key, value in others.items() if value.requires_grad}
        self._check_joined(joined)
        leaves |= {key: value.detach().clone().requires_grad_() for key, value in joined.items()}
        inputs = values | leaves
        positional = [inputs.pop(number) for number in range(len(arguments))]
        loss = self._loss(*positional, **inputs)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise ConfigError(
                f"the loss returned {_found(loss)}; it must return one scalar tensor, such as a weighted sum of losses"
            )
        del inputs, positional

        def loss_gradients() -> list[tuple[Tensor, Tensor]]:
            nonlocal loss
            gradients = self._loss_gradients(loss, leaves)
            leaves.clear()
            loss = loss.detach()  # frees its graph, which holds the features
            for key, source in zip(encoded, sources, strict=True):
                source.set_gradients(gradients[key])
            return [(value, gradients[key]) for key, value in joined.items()]

        after_loss = _random_state()
        with self.kept_statistics():
            passes.back_propagate(loss_gradients=loss_gradients)
        _set_random_state(after_loss)
        self._average_loss_parameters()
        _MICRO_STEPS.update({engine: engine.micro_steps for engine in self._deepspeed})
        self._kept.step_done()
        return loss

    def _loss_gradients(self, loss: Tensor, leaves: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the gradients of the inputs of the loss, and accumulate those of its parameters.

        float16 gradients are scaled while the loss is back-propagated, so that small ones do not become 0. DeepSpeed
        scales surrogates again, and expects scaled gradients of its own parameters only.
        """
        scale = loss_scale_of(self._deepspeed[0]) if self._deepspeed else 1.0
        scaled = loss if scale == 1 else loss * scale
        hooks = [p.register_hook(lambda gradient: gradient / scale) for p in self._loss_parameters() if scale != 1]
        # Not autograd.grad: the loss may have parameters.
        (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()
        for hook in hooks:
            hook.remove()
        gradients = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()}
        return gradients if scale == 1 else {key: each.float() / scale for key, each in gradients.items()}

    def _sources(self, encoded: list[Encoded]) -> list["_EncodedChunks"]:
        """Divide the inputs. All ranks agree on the numbers of chunks and of kept graphs by exchanging integers."""
        error: Exception | None = None
        chunks: list[Chunks] = []
        own = [-1]
        try:
            chunks = [divided(each.inputs, each.chunk, each.tokens, each.split) for each in encoded]
            divided_in = (len(part.inputs) * bool(each.divisors()) for part, each in zip(chunks, encoded, strict=True))
            own = [len(encoded), *divided_in]
        except Exception as problem:  # kept until every rank knows of it
            error = problem
        everyone = gather_integers((own + [0] * _PLACES)[:_PLACES], group=self._group)
        if error is not None:
            raise error
        for rank, (number, *_) in enumerate(everyone):
            if number < 0:
                raise DataError(f"rank {rank} could not divide its inputs into chunks; its error is in its output")
            if number != everyone[0][0]:
                raise DataError(
                    f"rank 0 passes {everyone[0][0]} Encoded arguments and rank {rank} {number}; pass the same on all "
                    "ranks: a rank without samples, such as hard negatives, passes inputs without rows"
                )
        if len(own) > _PLACES:  # on all ranks
            everyone = gather_integers(own, group=self._group)
        counts = [max(others) for others in zip(*everyone, strict=True)][1 : 1 + len(encoded)]
        sources = [
            _EncodedChunks(*each, self) for each in zip(range(len(encoded)), encoded, chunks, counts, strict=True)
        ]
        number = self._kept.number([source.elements() for source in sources])
        if self._kept.measures:
            numbers, elements = zip(*gather_integers([number, self._kept.elements], group=self._group), strict=True)
            number, self._kept.elements = min(numbers), max(elements)
        for source in sources:
            source.kept = source.count if source.is_whole else min(number, source.count)
            number -= 0 if source.is_whole else source.kept
        return sources

    def encode(self, source: "_EncodedChunks", inputs: Any) -> Tensor:
        """Encode a chunk, check that its gradients reach the engine, and record the size of its graph."""
        before, builds_graph, encoder = self._forwards, torch.is_grad_enabled(), source.encoded.encoder
        if builds_graph and not self._last_built_graph:
            torch.clear_autocast_cache()  # weights that were cast without a graph receive no gradients in torch 2.8
        self._last_built_graph = builds_graph
        if builds_graph:
            self._kept.before_graph()
        output = encoder() if source.encoded.inputs is None else encoder(inputs)
        if builds_graph:
            self._kept.after_graph(source.index, elements_of(inputs))
        if not isinstance(output, Tensor) or (source.encoded.inputs is not None and output.dim() != 2):
            raise ConfigError(
                f"an encoder returned {_found(output)}; it must return features of shape (samples, dimension)"
            )
        if self._deepspeed and output.requires_grad and self._forwards == before:
            raise ConfigError(
                "an encoder with trainable parameters did not call the DeepSpeed engine; call engine(...), not a "
                "method of engine.module, and let the module's forward choose what it encodes"
            )
        return output

    def kept_statistics(self) -> AbstractContextManager[None]:
        """Restore the running statistics of batch norms after the body, because an earlier pass has updated them."""
        owners = [*self._modules, *(used for encoder in self._encoders for used in _used_by(encoder))]
        parts = {part for owner in owners if isinstance(owner, nn.Module) for part in owner.modules()}
        norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._NormBase)]
        return restored([buffer for norm in norms for buffer in norm.buffers()])

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1

    def _check_engines(self) -> None:
        """Raise ConfigError if gradients would be wrong or lost."""
        for module in (used for encoder in self._encoders for used in _used_by(encoder)):
            if not isinstance(module, DeepSpeedEngine | DistributedDataParallel) or module in self._modules:
                continue
            if any(parameter.requires_grad for parameter in module.parameters()):
                raise ConfigError(
                    f"an encoder calls a {type(module).__name__} that GradientCache does not know; pass it as `engine`"
                )
        devices = {"cpu", get_accelerator().device_name()}
        dtypes = [torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)]
        if torch.float16 in dtypes and self._scaler is None and not self._deepspeed:
            raise ConfigError(
                "autocast is float16, in which small gradients become 0; pass scaler=torch.amp.GradScaler() to "
                "GradientCache, or use bfloat16"
            )
        for engine in self._deepspeed:
            if engine.zero_optimization_stage() in (1, 2) and _MICRO_STEPS.get(engine) == engine.micro_steps:
                raise ConfigError(
                    "GradientCache.step was called twice without engine.step() between, and ZeRO-1 and ZeRO-2 would "
                    "lose the gradients of the first call; call engine.step() after each, or add the losses in one loss"
                )

    def _check_joined(self, joined: dict[Any, Tensor]) -> None:
        stage_3 = [engine for engine in self._deepspeed if engine.zero_optimization_stage() == 3]
        for key, value in joined.items():
            if isinstance(value, DTensor) or (stage_3 and value.numel() == 0):
                raise ConfigError(
                    f"argument {key!r} was computed from a partitioned parameter outside the engine; pass "
                    f"Encoded(function), and let the function return it from the engine's forward pass"
                )

    def _loss_parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters that the loss names and no engine reduces."""
        reduced = {id(parameter) for module in self._modules for parameter in module.parameters()}
        used = [each for each in _used_by(self._loss) if isinstance(each, nn.Module | nn.Parameter)]
        found = (each.parameters() if isinstance(each, nn.Module) else [each] for each in used)
        return list({p: None for each in found for p in each if p.requires_grad and id(p) not in reduced})

    def _average_loss_parameters(self) -> None:
        """Average the gradients of these parameters. Ranks may use different ones."""
        parameters = self._loss_parameters() if self._modules else []
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        average_over_ranks(gradients, group=resolve(self._group))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None and gradient.any():  # only other ranks have used it
                parameter.grad = gradient


def _used_by(function: Any) -> list[Any]:
    """Return a callable and what it names: its object, bound arguments, and variables outside of it."""
    if isinstance(function, functools.partial):
        return [*_used_by(function.func), *function.args, *function.keywords.values()]
    used = [function, getattr(function, "__self__", None)]
    inner = getattr(function, "__func__", function)
    if inspect.isfunction(inner):
        names = inspect.getclosurevars(inner)
        used += [*names.nonlocals.values(), *names.globals.values()]
    return [getattr(each, "_orig_mod", each) for each in used]  # torch.compile's wrapper


class _EncodedChunks:
    """The chunks of an `Encoded` argument on this rank, as a `ChunkSource`.

    Chunks beyond this rank's own are blank: its last chunk again, or a row of `blank_of`, with gradient zero.

    count: number of chunks of the rank with the most, or 0 if no rank divides the inputs.
    """

    def __init__(self, index: int, encoded: Encoded, chunks: Chunks, count: int, cache: GradientCache) -> None:
        self.index, self.encoded, self.count, self.kept = index, encoded, max(1, count), 0
        self.is_trained, self.is_whole = True, count == 0
        self._chunks, self._order, self._cache = chunks.inputs, chunks.order, cache
        self._own = 0 if chunks.is_empty else len(chunks.inputs)
        self._states: list[Any] = []
        self._features: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def elements(self) -> list[int]:
        """Return the number of elements of each chunk whose graph need not be kept."""
        return [] if self.is_whole else [elements_of(inputs) for inputs in self.inputs(again=False)]

    def inputs(self, *, again: bool) -> Iterator[Any]:
        for chunk in range(self.kept if again else 0, self.count):
            yield self._chunks[min(chunk, len(self._chunks) - 1)]

    def forward(self, chunk: int, inputs: Any, *, with_graph: bool, again: bool) -> Outputs:
        if again:
            _set_random_state(self._states[chunk])
        else:
            self._states.append(_random_state())
        # A graph of the first chunk shows whether the encoder is trained. Unless it is kept, it is dropped at once.
        builds_graph = with_graph or chunk == 0
        is_blank = chunk >= self._own  # it has changed the running statistics already
        with torch.set_grad_enabled(builds_graph), self._cache.kept_statistics() if is_blank else nullcontext():
            output = self._cache.encode(self, inputs)
        if chunk == 0:
            self.is_trained = output.requires_grad
        return Outputs({self.index: output if with_graph else output.detach()})

    def store(self, chunk: int, outputs: Outputs) -> None:
        if chunk < max(1, self._own):
            features = outputs.features[self.index].detach()
            self._features.append(features if self._own else features[:0])

    def features(self) -> Tensor:
        """Return the features of all samples in their order, as a leaf, and keep no other copy."""
        whole = self._features[0] if len(self._features) == 1 else torch.cat(self._features)
        self._lengths = [len(each) for each in self._features] if whole.dim() else [1]
        self._features.clear()
        if self._order is not None:
            whole = whole[self._order.argsort().to(whole.device)]
        return whole.detach().requires_grad_(self.is_trained)

    def set_gradients(self, gradient: Tensor) -> None:
        """Keep the gradients of all samples, in their order."""
        if self._order is not None:
            gradient = gradient[self._order.to(gradient.device)]
        self._gradients = list(gradient.split(self._lengths)) if gradient.dim() else [gradient]

    def gradients(self, chunk: int) -> dict[Role, Tensor]:
        return {self.index: self._gradients[chunk]} if chunk < self._own else {}

    def resume(self, chunk: int) -> None: ...


def _found(output: Any) -> str:
    """Return what a function returned, for an error."""
    return f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def _random_state() -> tuple[Tensor, Tensor]:
    """Return the states of PyTorch's generators on the CPU and on the current accelerator, which may be the CPU."""
    accelerator: Any = get_accelerator()
    return torch.get_rng_state(), accelerator.get_rng_state()


def _set_random_state(state: tuple[Tensor, Tensor]) -> None:
    """Set both generators to a state of `_random_state`."""
    accelerator: Any = get_accelerator()
    torch.set_rng_state(state[0])
    accelerator.set_rng_state(state[1])

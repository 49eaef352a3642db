"""open_clip's training steps for tools/bench_train.py: plain and compiled, by the installed package or a source tree.

`OpenClipSteps` repeats what open_clip's trainer does with `--local-loss --gather-with-grad` (`open_clip_train/train.py`
of 3.3.0 and of 4.2.0.dev0). With one chunk a step is one forward and one backward pass. With k chunks it repeats
`--accum-freq k`: encode each chunk without a graph and keep all of them on the GPU; then encode each again and evaluate
the loss over the whole batch, k times. "pure_bf16" has all weights and pixels in bfloat16.

Where open_clip's versions differ, the faster way is used for all of them:

* The pixels of a step are normalised and on the GPU before the step's clock starts. There is no time for data.
* AdamW is PyTorch's fused one. open_clip's trainers leave the choice to PyTorch, which takes the slower "foreach".
* On several GPUs, DDP reduces gradients after the last chunk only (`no_sync`), as 4.2 does.
* cuDNN's benchmark mode and TF32 are on, as in open_clip's trainers.

torch.compile has two extents, those of 4.2's `--torchcompile-strategy`:

* "model" compiles the model, as `--torchcompile` of 3.3 does. 4.2 does so before DDP, which is repeated here.
* "task", the default of 4.2, compiles model and loss together. With several chunks 4.2 then compiles nothing, so the
  method is refused there.
"""

import math
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import deepspeed.comm as dist
import torch
from bench_methods import Case, Clock, case_arguments, case_inputs, free_memory
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaclip.comm.collectives import gather_objects
from megaclip.config import TrainingConfig
from megaclip.data import Batch, TrainLoader
from megaclip.devices import upload
from megaclip.engine.inputs import Inputs
from megaclip.errors import ConfigError
from megaclip.models import build_model
from megaclip.models.hugging_face import known_configurations
from megaclip.models.open_clip_keys import to_open_clip
from megaclip.open_clip_package import import_open_clip

Chunk = tuple[Tensor, Tensor]
"""Normalised pixels and tokens of one chunk, on the device."""


def use_source(tree: Path) -> None:
    """Import open_clip from the source tree `tree` from now on. Raises ConfigError if it does not contain open_clip."""
    folder = next((folder for folder in (tree / "src", tree) if (folder / "open_clip" / "__init__.py").is_file()), None)
    if folder is None:
        raise ConfigError(
            f"--open-clip-source {str(tree)!r} contains neither src/open_clip nor open_clip; give the folder of an "
            "open_clip checkout"
        )
    sys.path.insert(0, str(folder.resolve()))


class OpenClipSteps:
    """open_clip's model, loss and step, with the learning rate, clipping and checkpointing of the case's ds_config."""

    compiles: Literal["nothing", "model", "task"] = "nothing"
    kept_graphs: ClassVar[list[int]] = []
    recomputes = False
    text_micro_batch = 0  # that of the images
    text_positions_saved = 0.0
    """open_clip encodes the padding of captions."""

    def __init__(self, case: Case, clock: Clock) -> None:
        package = import_open_clip()
        self.program = f"open_clip {package.__version__}"
        self.compiled = self.compiles != "nothing"
        self._clock = clock
        with tempfile.TemporaryDirectory() as folder:
            arguments = case_arguments(case, Path(folder))
        inputs = case_inputs(case, arguments)
        self._config: TrainingConfig = inputs.config
        self._batch_layout = inputs.config.batch_layout(dist.get_world_size())
        if self.compiles == "task" and self._batch_layout.accumulation > 1:
            raise ConfigError(
                f"open_clip compiles nothing with --torchcompile-strategy task and {self._batch_layout.accumulation} "
                "chunks; use the method open_clip_compiled, or one chunk"
            )
        self._device = torch.device(get_accelerator().current_device_name())
        self._dtype = torch.bfloat16 if case.precision == "pure_bf16" else torch.float32
        self._precision = case.precision
        self._transform = inputs.train_transform
        model = _open_clip_model(package, inputs, case.seed, self._device).to(self._dtype).train()
        if self._config.activation_checkpointing:
            model.set_grad_checkpointing()
        self._bare = model
        self._model = self._parallel(torch.compile(model) if self.compiles == "model" else model)
        options: dict[str, Any] = {"local_loss": True, "gather_with_grad": True, "rank": dist.get_rank()}
        options |= {"world_size": self._batch_layout.world_size, "cache_labels": self.compiles != "task"}
        self._decodes = inputs.model_config.has_decoder
        if self._decodes and self._batch_layout.accumulation > 1:
            raise ConfigError("open_clip's CoCaLoss takes the whole batch at once; use one chunk")
        loss = package.loss.CoCaLoss(2.0, 1.0, **options) if self._decodes else package.loss.ClipLoss(**options)
        # A graph of model and loss together has no point in time at which the loss starts.
        self._loss = loss if self.compiles == "task" else clock.loss(loss)
        self._whole_step = torch.compile(self._model_and_loss) if self.compiles == "task" else self._model_and_loss
        self._optimizer = _open_clip_optimizer(model, self._config, fused=self._device.type == "cuda")
        self._chunks: list[Chunk] = []
        self._loader = TrainLoader(
            inputs.train,
            inputs.train_transform,
            inputs.tokenizer,
            micro_batch_size=self._batch_layout.micro_batch,
            micro_batches_per_step=self._batch_layout.accumulation,
            rank=dist.get_rank(),
            world_size=self._batch_layout.world_size,
            seed=case.seed,
            num_workers=case.workers,
        )
        self._flags = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True

    def prepare(self) -> None:
        """Load the next step's chunks onto the device."""
        self._chunks = [self._on_device(next(self._loader)) for _ in range(self._batch_layout.accumulation)]

    def step(self) -> float:
        """Run one step over the prepared chunks; return the loss."""
        chunks, self._chunks = self._chunks, []
        if len(chunks) == 1:
            with self._autocast():
                loss = self._whole_step(*chunks[0])
            loss.backward()
            return self._update(loss)
        features: dict[str, list[Tensor]] = {"image_features": [], "text_features": []}
        with torch.no_grad(), self._autocast():
            for chunk in chunks:
                output = self._model(*chunk)
                for name, parts in features.items():
                    parts.append(output[name])
        loss = torch.zeros(())
        for index, chunk in enumerate(chunks):
            is_last = index == len(chunks) - 1
            with nullcontext() if is_last or self._batch_layout.world_size == 1 else self._model.no_sync():
                with self._autocast():
                    output = self._model(*chunk)
                    whole = {
                        name: torch.cat([*parts[:index], output[name], *parts[index + 1 :]])
                        for name, parts in features.items()
                    }
                    loss = self._loss(whole["image_features"], whole["text_features"], output["logit_scale"])
                    del whole
                loss.backward()
        return self._update(loss)

    def close(self) -> None:
        """Free the memory."""
        self._loader.close()
        del self._bare, self._model, self._loss, self._whole_step, self._optimizer, self._loader, self._chunks
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = self._flags
        free_memory()

    def _parallel(self, model: Any) -> Any:
        """Return the model, in DDP on several ranks."""
        if self._batch_layout.world_size == 1:
            return model
        devices = [self._device] if self._device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def _model_and_loss(self, images: Tensor, texts: Tensor) -> Tensor:
        output = self._model(images, texts)
        features = output["image_features"], output["text_features"]
        if self._decodes:
            logits, labels = output["logits"], texts[:, 1:]  # 4.2 has logits behind the last token
            contrastive, caption = self._loss(*features, logits[:, : labels.shape[1]], labels, output["logit_scale"])
            return contrastive + caption
        return self._loss(*features, output["logit_scale"])

    def _on_device(self, batch: Batch) -> Chunk:
        images = self._transform.normalise(upload(batch.images, self._device), self._dtype)
        return images, upload(batch.tokens, self._device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._precision == "amp_bf16" else nullcontext()

    def _update(self, loss: Tensor) -> float:
        end = self._clock.begin("update")
        if clipping := self._config.deepspeed["gradient_clipping"]:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            self._bare.logit_scale.clamp_(0, math.log(100))
        end()
        return sum(gather_objects(float(loss.detach()))) / self._batch_layout.world_size  # mean of local losses


class CompiledOpenClipSteps(OpenClipSteps):
    """open_clip's steps with a compiled model."""

    compiles = "model"


class CompiledOpenClipTaskSteps(OpenClipSteps):
    """open_clip's steps with model and loss compiled together. Each step has one chunk."""

    compiles = "task"


def _open_clip_model(package: Any, inputs: Inputs, seed: int, device: torch.device) -> Any:
    """Return open_clip's model with the initial values that this project draws from the same seed."""
    torch.manual_seed(seed)
    config = inputs.model_config
    weights = to_open_clip(build_model(config).state_dict(), config)
    description = config.to_open_clip()
    description.pop("custom_text", None)  # it selects the class
    description["vision_cfg"]["timm_model_pretrained"] = description["text_cfg"]["hf_model_pretrained"] = False
    has_text_prefix = any(name.startswith("text.") for name in weights)
    kind = package.CustomTextCLIP if has_text_prefix else package.CLIP
    with device, known_configurations():
        model = package.CoCa(**description) if config.has_decoder else kind(**description, output_dict=True)
    model.load_state_dict(weights)
    return model


def _open_clip_optimizer(model: torch.nn.Module, config: TrainingConfig, *, fused: bool) -> torch.optim.Optimizer:
    """Return AdamW with open_clip's two groups. Its states are made here, so that every step has them in memory."""
    settings = config.deepspeed["optimizer"]["params"]
    named = list(model.named_parameters())
    not_decayed = [p for name, p in named if p.ndim < 2 or any(word in name for word in ("bn", "ln", "bias"))]
    decayed = [p for _, p in named if all(p is not other for other in not_decayed)]
    optimizer = torch.optim.AdamW(
        [
            {"params": not_decayed, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": settings.get("weight_decay", 0.0)},
        ],
        lr=0.0,
        betas=tuple(settings.get("betas", (0.9, 0.999))),
        eps=settings.get("eps", 1e-8),
        fused=fused,
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].zero_()
    return optimizer

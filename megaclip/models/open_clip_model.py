"""open_clip's own modules as a `DualEncoder`: timm trunks, Hugging Face text models, ResNets, every open_clip tower.

The modules compute what open_clip computes, and have open_clip's parameter names. They are not tensor parallel.

Libraries set initial values in their constructors, after the values of submodules. `deepspeed.zero.Init` would have
partitioned these by then, so the modules are built whole on the CPU and partitioned afterwards.

Batch norms normalise a training chunk by the mean and deviation of that chunk on that rank. Their running statistics,
which evaluation uses, are float32 even if the parameters are bfloat16: in bfloat16 the moving average would lose most
of its updates. The gradient cache decides which passes change them (`DualEncoder.statistics`).

Shapes: b batch, D embedding.
"""

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megaclip.comm.parallelism import ONE_RANK
from megaclip.errors import ConfigError, first_line
from megaclip.models.caption_decoder import CaptionDecoder
from megaclip.models.dual_encoder import DualEncoder
from megaclip.models.hugging_face import known_configurations, position_limit
from megaclip.models.open_clip_config import OpenClipConfig
from megaclip.models.packing import Pieces
from megaclip.models.text import is_cut_exact
from megaclip.models.vision import patch_products
from megaclip.open_clip_package import import_open_clip


class OpenClipModel(DualEncoder):
    """Dual encoder of open_clip's modules, with the initial values of their libraries, from torch's global seed.

    Raises ConfigError if the libraries cannot build the model, CheckpointError if open_clip is not installed.
    """

    config: OpenClipConfig

    def __init__(self, config: OpenClipConfig) -> None:
        super().__init__()
        self.config = config
        self.tensor = ONE_RANK
        built = _build(config)
        self.visual, self.text = built.visual, built.text
        self.text_decoder = self._decoder(built) if config.has_decoder else None
        self._tokens: dict[str, torch.Tensor] = {}
        self._check_context_length()
        # Shape (1,), because DeepSpeed cannot initialise with 0-d parameters.
        self.logit_scale = nn.Parameter(torch.full((1,), config.init_logit_scale))
        bias = config.init_logit_bias
        self.logit_bias = None if bias is None else nn.Parameter(torch.full((1,), bias))
        for module in self.text.modules():
            if type(module).__name__.endswith("SinusoidalPositionalEmbedding"):
                module.register_forward_hook(self._in_the_parameters_dtype)
        if is_cut_exact(config.text_cfg):
            transformer = self.text.get_submodule("transformer")
            transformer.register_forward_pre_hook(_with_mask_of_its_length, with_kwargs=True)
        for module in self.visual.modules():
            if _embeds_patches(module):
                module.__class__ = _PatchConvolution
        _normalise_rows(self.visual)
        self._norms = [module for module in self.modules() if isinstance(module, _BatchNorm)]
        for norm in self._norms:
            norm.__class__ = _with_float32_statistics(type(norm))

    def _check_context_length(self) -> None:
        """Raise ConfigError if a Hugging Face text model has too few positions. Only a long caption would fail."""
        text = self.config.text_cfg
        limit = position_limit(self.text) if text.hf_model_name is not None else None
        if limit is not None and text.context_length > limit:
            raise ConfigError(
                f"text_cfg.context_length is {text.context_length}, and {text.hf_model_name} has positions for {limit} "
                f"tokens; set context_length to {limit} or less"
            )

    def _in_the_parameters_dtype(self, _: nn.Module, arguments: Any, positions: torch.Tensor) -> torch.Tensor:
        """Return positions, from a buffer that stays float32, in the dtype of the embeddings they are added to."""
        return positions.to(self.logit_scale.dtype)

    def _decoder(self, built: Any) -> CaptionDecoder:
        """Return the caption decoder, with the padding of the text tower."""
        if type(getattr(self.text, "pooler", None)).__name__ == "ClsPooler":
            raise ConfigError(
                f"text_cfg.hf_pooler_type of {self.config.text_cfg.hf_model_name} is cls_pooler, which removes the "
                'first token, and the labels of multimodal_cfg require all; use "mean_pooler"'
            )
        config = getattr(self.text, "config", None)
        pad_id = self.config.text_cfg.pad_id if config is None else config.pad_token_id
        return CaptionDecoder(built.text_decoder, pad_id)

    def tower_tokens(self) -> dict[str, torch.Tensor]:
        tokens, self._tokens = self._tokens, {}
        return tokens

    def parts(self) -> dict[str, nn.Module]:
        return super().parts() | ({} if self.text_decoder is None else {"decoder": self.text_decoder})

    def _features(self, tower: nn.Module, inputs: torch.Tensor, *others: Pieces) -> torch.Tensor:
        if inputs.is_floating_point():
            inputs = inputs.to(self.logit_scale.dtype)
        features = super()._features(tower, inputs, *others)
        if isinstance(features, tuple):
            features, tokens = features
            if torch.is_grad_enabled() and self.objective is not None and self.training:
                self._tokens["image_tokens" if tower is self.visual else "text_tokens"] = tokens
        return features

    def blank(self, row: torch.Tensor) -> torch.Tensor:
        """Return rows from which the towers compute finite features.

        A batch norm cannot compute a deviation from one value per channel, and a caption of padding has no mean token.
        """
        if row.is_floating_point():
            return row.expand(2, *row.shape[1:]) if self._norms else row
        padding = getattr(getattr(self.text, "config", None), "pad_token_id", None)
        return torch.full_like(row, 1) if padding == 0 else torch.zeros_like(row)

    def lock_tower(self, name: str, unlocked_groups: int = 0) -> None:
        """Freeze a tower as open_clip's --lock-image and --lock-text do.

        A projection behind a timm trunk or a Hugging Face model stays trained.
        """
        tower: Any = self.parts()[name]
        flag = "image-unlocked-groups" if name == "image" else "text-unlocked-layers"
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # open_clip prints the number of unlocked layers
                tower.lock(unlocked_groups)  # the first argument of all towers
        except Exception as error:  # open_clip does not document the exceptions that it raises
            raise ConfigError(
                f"--lock-{flag} {unlocked_groups}: open_clip cannot lock {type(tower).__name__} with this value: "
                f"{type(error).__name__}: {first_line(error)}; use 0, or a smaller number"
            ) from None

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the text tower."""
        return int(self.text.vocab_size)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "OpenClipModel":
        """Apply `fn`, which casts or moves, to all tensors, but cast running statistics to no less than float32."""
        exact = [(norm, name, getattr(norm, name)) for norm in self._norms for name in ("running_mean", "running_var")]
        super()._apply(fn, recurse)
        for norm, name, before in exact:
            after = getattr(norm, name)
            if before is not None and after.dtype != torch.promote_types(after.dtype, torch.float32):
                setattr(norm, name, before.to(after.device))
        return self


class _PatchConvolution(nn.Conv2d):
    """Convolution of images (b, 3, height, width) whose stride is its kernel size, computed as a matrix product."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.shape[2] // self.kernel_size[0]
        return patch_products(images, self).transpose(1, 2).unflatten(2, (rows, -1))


def _embeds_patches(module: nn.Module) -> bool:
    """Return whether a module embeds patches that do not overlap, as vision transformers and ConvNeXt do. The result
    has the memory format "channels last", which ConvNeXt's first layer norm would make otherwise."""
    return (
        type(module) is nn.Conv2d
        and module.in_channels == 3
        and module.stride == module.kernel_size
        and min(module.stride) >= 4
        and (module.padding, module.dilation, module.groups) == ((0, 0), (1, 1), 1)
    )


def _normalise_rows(tower: nn.Module) -> None:
    """Make a tower's layer norms treat the positions of an image as rows of a matrix; the values are the same.

    Otherwise torch.compile stores the means of the positions with height and width swapped, and gradients have this
    order too. Every convolution then copies its gradient back: 2 % of a step of ConvNeXt-base on an H200.
    """
    from timm.layers import LayerNorm, LayerNorm2d

    class _RowNorm(LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(0, -2)).view(x.shape)

    class _RowNorm2d(_RowNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    by_rows: dict[type[nn.Module], type[nn.Module]] = {LayerNorm: _RowNorm, LayerNorm2d: _RowNorm2d}
    for module in tower.modules():
        if type(module) in by_rows:
            module.__class__ = by_rows[type(module)]


def _with_mask_of_its_length(
    _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut the causal mask of open_clip's text transformer, which has the context length, to that of the captions."""
    x_bLC, *others = arguments
    mask = others[0] if others else options.get("attn_mask")
    if mask is None:
        return arguments, options
    length = x_bLC.shape[1]
    return (x_bLC,), {**options, "attn_mask": mask[..., :length, :length]}


def _build(config: OpenClipConfig) -> Any:
    """Return open_clip's model, whose towers and scalars are used; it is built without pretrained weights."""
    package = import_open_clip()
    import timm

    description = config.to_open_clip()
    timm_arguments = description["vision_cfg"].pop("timm_model_kwargs", None) or {}
    create_timm = functools.partial(timm.create_model, **timm_arguments)
    if config.text_cfg.hf_model_name is not None:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"text_cfg.hf_model_name {config.text_cfg.hf_model_name!r} requires transformers, which cannot be "
                f"imported ({error}); run  pip install 'megaclip[open-clip]'"
            ) from None
    # CustomTextCLIP also builds the towers of open_clip's class CLIP, whose text tower has no module of its own.
    build = package.CustomTextCLIP
    if config.has_decoder:
        build = functools.partial(package.CoCa, multimodal_cfg=description["multimodal_cfg"])
    try:
        with known_configurations(), mock.patch.object(timm, "create_model", create_timm):
            return build(
                embed_dim=config.embed_dim,
                vision_cfg={**description["vision_cfg"], "timm_model_pretrained": False},
                text_cfg={**description["text_cfg"], "hf_model_pretrained": False},
                quick_gelu=config.quick_gelu,
            )
    except ConfigError:
        raise
    except Exception as error:  # the libraries do not document what they raise
        advice = "correct vision_cfg and text_cfg, or install versions of open_clip, timm and transformers that have it"
        if "patch_drop_rate" in str(error):  # the argument of timm's trunks that have it
            advice = "vision_cfg.patch_dropout has no effect on this image tower; set it to 0"
        raise ConfigError(
            f"open_clip cannot build the model: {type(error).__name__}: {first_line(error)}; {advice}"
        ) from error


def _with_float32_statistics(norm_class: type) -> type:
    """Return a subclass of a batch norm that computes in float32, or higher precision, and returns its input's dtype.

    PyTorch's kernels take running statistics in float32 only together with float32 weights.
    """

    def wide(name: str) -> property:
        def get(self: Any) -> torch.Tensor | None:
            value = self._parameters[name]
            return None if value is None else value.to(torch.promote_types(value.dtype, torch.float32))

        return property(get)

    return type(norm_class.__name__, (norm_class,), {"weight": wide("weight"), "bias": wide("bias")})

"""The models of the zoo: name -> function that gives (module, args); small, random weights.

One or two models of each family. transformers configurations are shrunk; of torchvision's and timm's
models the deep stages are cut to two blocks, which leaves the operators and saves the time, and those
that take any size get small images. Random weights as they come would prove little: blocks scaled by
1e-6, zeros, activations that die out; ``enliven`` gives them sizes as of trained ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False}
_IMAGE = {
    **{k: v for k, v in _TEXT.items() if k != "vocab_size"},
    "image_size": 32,
    "patch_size": 8,
}

#: config class -> (overrides, kind of input)
TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    "BertConfig": (_TEXT, "mask"),
    "RobertaConfig": ({**_TEXT, "max_position_embeddings": 40}, "mask"),
    "DistilBertConfig": (
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99},
        "mask",
    ),
    "ElectraConfig": ({**_TEXT, "embedding_size": 32}, "mask"),
    "AlbertConfig": ({**_TEXT, "embedding_size": 16}, "mask"),
    "MPNetConfig": (_TEXT, "mask"),
    "DebertaV2Config": (
        {**_TEXT, "pos_att_type": ["p2c", "c2p"], "relative_attention": True},
        "mask",
    ),
    "FNetConfig": (_TEXT, "ids"),
    "LlamaConfig": (_DECODER, "ids"),
    "MistralConfig": (_DECODER, "ids"),
    "Qwen2Config": (_DECODER, "ids"),
    "Qwen3Config": (_DECODER, "ids"),
    "Qwen3MoeConfig": (
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "ids",
    ),
    "GemmaConfig": (_DECODER, "ids"),
    "Gemma2Config": (_DECODER, "ids"),
    "Phi3Config": ({**_DECODER, "pad_token_id": 0}, "ids"),
    "FalconConfig": ({**_TEXT, "use_cache": False, "multi_query": True}, "ids"),
    "GPT2Config": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "use_cache": False},
        "ids",
    ),
    "GPTNeoXConfig": ({**_TEXT, "use_cache": False}, "ids"),
    "OPTConfig": ({**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}, "ids"),
    "BloomConfig": (
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "use_cache": False},
        "ids",
    ),
    "ViTConfig": (_IMAGE, "image"),
    "Dinov2Config": (_IMAGE, "image"),
    "BeitConfig": (_IMAGE, "image"),
    "SwinConfig": (
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image",
    ),
    "ConvNextConfig": ({"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}, "image"),
    "MobileNetV2Config": ({"image_size": 32, "depth_multiplier": 0.35}, "image"),
    "MobileViTConfig": (
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
        },
        "image64",
    ),
    "SegformerConfig": (
        {
            "hidden_sizes": [8, 8, 16, 16],
            "decoder_hidden_size": 16,
            "depths": [1] * 4,
            "num_attention_heads": [1, 1, 2, 2],
        },
        "image64",
    ),
    "ResNetConfig": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, "image"),
    "PoolFormerConfig": ({"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}, "image64"),
    "WavLMConfig": (
        {
            **_TEXT,
            "conv_dim": (16, 16),
            "conv_kernel": (8, 4),
            "conv_stride": (4, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
        "sound",
    ),
    "HubertConfig": (
        {
            **_TEXT,
            "conv_dim": (16, 16),
            "conv_kernel": (8, 4),
            "conv_stride": (4, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
        "sound",
    ),
}

#: name -> size of the image (what a model needs, or small)
TORCHVISION = {
    "alexnet": 96,
    "vgg11_bn": 64,
    "resnet18": 64,
    "resnext50_32x4d": 64,
    "densenet121": 64,
    "googlenet": 64,
    "inception_v3": 96,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "squeezenet1_0": 64,
    "shufflenet_v2_x0_5": 64,
    "mnasnet0_5": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "convnext_tiny": 64,
    "vit_b_16": 224,
    "swin_t": 64,
    "swin_v2_t": 64,
    "maxvit_t": 224,
    "deeplabv3_mobilenet_v3_large": 96,
    "lraspp_mobilenet_v3_large": 96,
    "fcn_resnet50": 64,
}
DETECTION = {
    "ssdlite320_mobilenet_v3_large": 320,
    "retinanet_resnet50_fpn": 128,
    "fasterrcnn_mobilenet_v3_large_320_fpn": 128,
}
VIDEO = {"r3d_18": 32, "r2plus1d_18": 32, "s3d": 64, "swin3d_t": 32, "mvit_v2_s": 224}
FLOW = {"raft_small": 128}
#: name -> size of the image; None: the model's own
TIMM: dict[str, int | None] = {
    "resnet10t": 64,
    "botnet26t_256": None,
    "halonet26t": None,
    "lambda_resnet26t": None,
    "gcvit_xxtiny": None,
    "coatnet_nano_rw_224": None,
    "coat_lite_mini": None,
    "maxvit_nano_rw_256": None,
    "mobilevit_xxs": None,
    "mobilevitv2_050": None,
    "efficientformer_l1": None,
    "efficientformerv2_s0": None,
    "edgenext_xx_small": 128,
    "efficientvit_b0": 128,
    "efficientvit_m0": None,
    "levit_128s": None,
    "poolformer_s12": 64,
    "caformer_s18": 64,
    "mixer_s32_224": None,
    "resmlp_12_224": None,
    "gmlp_ti16_224": None,
    "convmixer_768_32": 56,
    "vit_tiny_patch16_224": None,
    "vit_relpos_small_patch16_224": None,
    "xcit_nano_12_p16_224": None,
    "cait_xxs24_224": None,
    "deit_tiny_distilled_patch16_224": None,
    "beit_base_patch16_224": None,
    "swin_tiny_patch4_window7_224": None,
    "swinv2_tiny_window8_256": None,
    "swinv2_cr_tiny_ns_224": None,
    "twins_svt_small": None,
    "twins_pcpvt_small": None,
    "pvt_v2_b0": 64,
    "pit_ti_224": None,
    "tnt_s_patch16_224": None,
    "nest_tiny": None,
    "crossvit_9_240": None,
    "convit_tiny": None,
    "visformer_tiny": None,
    "volo_d1_224": None,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "focalnet_tiny_srf": 224,
    "davit_tiny": None,
    "tiny_vit_5m_224": None,
    "mvitv2_tiny": None,
    "eva02_tiny_patch14_224": None,
    "hiera_tiny_224": None,
    "samvit_base_patch16_224": None,
    "inception_next_atto": 64,
    "sequencer2d_s": None,
    "mambaout_femto": 64,
    "swiftformer_xs": None,
    "fastvit_t8": 64,
    "mobileone_s0": 160,
    "repvgg_a0": 64,
    "repvit_m0_9": 64,
    "starnet_s1": 64,
    "fasternet_t0": 64,
    "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small": 64,
    "tf_efficientnet_lite0": 64,
    "mixnet_s": 64,
    "ghostnet_050": 64,
    "tinynet_e": 64,
    "lcnet_050": 64,
    "hardcorenas_a": 64,
    "rexnet_100": 64,
    "nfnet_f0": 64,
    "hrnet_w18_small": 64,
    "dla34": 160,
    "dpn48b": 64,
    "selecsls42b": 160,
    "res2net50_14w_8s": 64,
    "resnest14d": 64,
    "skresnet18": 64,
    "gcresnext26ts": 64,
    "ecaresnet26t": 64,
    "bat_resnext26ts": None,
    "cspresnet50": 64,
    "ese_vovnet19b_dw": 64,
    "xception41": 64,
    "tresnet_m": 64,
    "nasnetalarge": 96,
}


def enliven(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Give weights that are zero, one or tiny the sizes of trained ones, and batch norms statistics."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.is_floating_point() or not weight.numel():
                continue
            largest = float(weight.abs().max())
            noise = torch.randn(weight.shape, generator=random).to(weight)
            if largest == 0:
                weight.copy_(noise * 0.05)
            elif weight.numel() == max(weight.shape, default=1) and bool((weight == largest).all()):
                weight.copy_((0.5 if largest < 0.05 else largest) * (1 + 0.1 * noise))
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        norms = [norm for norm in norms if norm.track_running_stats]
        moments = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train()
            norm.momentum = 0.9
        if norms:
            model(*(torch.cat([x, x.flip(-1)]) if x.is_floating_point() else x for x in args))
        for norm, momentum in zip(norms, moments, strict=True):
            norm.momentum = momentum
    model.eval()


def cut(model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
    """The model with two blocks of each run of equal ones, where it still runs so."""
    short = copy.deepcopy(model)
    for stage in list(short.modules()):
        if type(stage) not in (nn.Sequential, nn.ModuleList) or len(stage) < 3:  # type: ignore[arg-type]
            continue
        blocks = list(stage.children())[1:]
        shapes = {tuple(weight.shape for weight in block.parameters()) for block in blocks}
        plain = isinstance(blocks[0], (nn.Sequential, nn.ModuleList, nn.Conv2d, nn.Linear))
        if len({type(block) for block in blocks}) > 1 or len(shapes) > 1 or shapes == {()} or plain:
            continue
        del stage[2:]  # type: ignore[attr-defined]
    try:
        with torch.no_grad():
            short(*args)
    except Exception:  # noqa: BLE001 - some models count their blocks
        return model
    return short


def other_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs of the same shapes with other values; masks stay."""
    random = torch.Generator().manual_seed(11)
    made: list[Any] = []
    for x in args:
        if x.is_floating_point():
            made.append(x.flip(-1) * 0.7 + 0.3 * torch.randn(x.shape, generator=random).to(x))
        else:
            made.append(x.flip(-1))
    return tuple(made)


class _Tensors(nn.Module):
    """All tensors that a model gives, in order; of inputs in order."""

    def __init__(self, model: nn.Module, *, listed: bool = False, **options: int) -> None:
        super().__init__()
        self.model = model
        self.listed = listed  # a detector takes a list of images
        self.options = options

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch.utils import _pytree

        images = [image[0] for image in args]
        found = self.model(images) if self.listed else self.model(*args, **self.options)
        leaves = [x for x in _pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
        return tuple({id(leaf): leaf for leaf in leaves}.values())


def _transformers(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        overrides, kind = TRANSFORMERS[name]
        config = getattr(transformers, name)(**overrides)
        model = transformers.AutoModel.from_config(config).eval()
        ids = torch.randint(3, 90, (1, 9))
        inputs: dict[str, tuple[Any, ...]] = {
            "mask": (ids, torch.ones_like(ids)),
            "ids": (ids,),
            "image": (torch.randn(1, 3, 32, 32),),
            "image64": (torch.randn(1, 3, 64, 64),),
            "sound": (torch.randn(1, 800),),
        }
        enliven(model, inputs[kind])
        return _Tensors(model).eval(), inputs[kind]

    return build


def _torchvision(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        size = {**TORCHVISION, **DETECTION, **VIDEO, **FLOW}[name]
        options: dict[str, Any] = {"weights": None}
        if name in DETECTION or name.startswith(("deeplabv3", "lraspp", "fcn")):
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False  # theirs takes a minute
        model = torchvision.models.get_model(name, **options).eval()
        if name in DETECTION:
            return _Tensors(model, listed=True).eval(), (torch.rand(1, 3, size, size),)
        frames = (16,) if name in VIDEO else ()
        args: tuple[Any, ...] = (torch.randn(1, 3, *frames, size, size),)
        if name in FLOW:
            args = (args[0], args[0].roll(2, -1))
            enliven(model, args)
            return _Tensors(model, num_flow_updates=2).eval(), args
        model = cut(model, args)
        enliven(model, args)
        return _Tensors(model).eval(), args

    return build


def _timm(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        model = timm.create_model(name, pretrained=False).eval()
        own = model.default_cfg["input_size"]
        size = TIMM[name]
        args = (torch.randn(1, *(own if size is None else (own[0], size, size))),)
        model = cut(model, args)
        enliven(model, args)
        return model.eval(), args

    return build


MODELS: dict[str, Callable[[], Built]] = {
    **{f"transformers/{name}": _transformers(name) for name in TRANSFORMERS},
    **{
        f"torchvision/{name}": _torchvision(name)
        for name in (*TORCHVISION, *DETECTION, *VIDEO, *FLOW)
    },
    **{f"timm/{name}": _timm(name) for name in TIMM},
}

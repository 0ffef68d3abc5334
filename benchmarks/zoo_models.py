"""The models of the zoo: name -> function that gives (module, args); small, random weights.

transformers configurations are shrunk; torchvision and timm models are taken as they are, one of each
family. A model that cannot be built in the present environment is reported as absent, not as failed.
"""

from __future__ import annotations

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

TORCHVISION = (
    "alexnet",
    "vgg11",
    "resnet18",
    "densenet121",
    "googlenet",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "squeezenet1_0",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "efficientnet_b0",
    "regnet_y_400mf",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
)
TIMM = (
    "botnet26t_256",
    "halonet26t",
    "cspresnet50",
    "dla34",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientvit_b0",
    "fastvit_t8",
    "ghostnet_050",
    "hardcorenas_a",
    "hrnet_w18_small",
    "lambda_resnet26t",
    "lcnet_050",
    "levit_128s",
    "mixer_s32_224",
    "mobileone_s0",
    "mobilevitv2_050",
    "nfnet_f0",
    "pit_ti_224",
    "poolformer_s12",
    "pvt_v2_b0",
    "repvgg_a0",
    "res2net50_14w_8s",
    "rexnet_100",
    "selecsls42b",
    "sequencer2d_s",
    "tf_efficientnet_lite0",
    "tinynet_e",
    "tnt_s_patch16_224",
    "volo_d1_224",
    "xcit_nano_12_p16_224",
)


class _First(nn.Module):
    """The first tensor that a model gives, of inputs in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found = self.model(*args)
        while not isinstance(found, torch.Tensor):
            found = next(iter(found.values())) if hasattr(found, "values") else found[0]
        return found


def _transformers(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        overrides, kind = TRANSFORMERS[name]
        config = getattr(transformers, name)(**overrides)
        model = transformers.AutoModel.from_config(config)
        ids = torch.randint(3, 90, (1, 9))
        inputs: dict[str, tuple[Any, ...]] = {
            "mask": (ids, torch.ones_like(ids)),
            "ids": (ids,),
            "image": (torch.randn(1, 3, 32, 32),),
            "image64": (torch.randn(1, 3, 64, 64),),
            "sound": (torch.randn(1, 800),),
        }
        return _First(model).eval(), inputs[kind]

    return build


def _torchvision(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        size = 299 if name == "inception_v3" else 224
        return torchvision.models.get_model(name, weights=None).eval(), (
            torch.randn(1, 3, size, size),
        )

    return build


def _timm(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        model = timm.create_model(name, pretrained=False).eval()
        return model, (torch.randn(1, *model.default_cfg["input_size"]),)

    return build


MODELS: dict[str, Callable[[], Built]] = {
    **{f"transformers/{name}": _transformers(name) for name in TRANSFORMERS},
    **{f"torchvision/{name}": _torchvision(name) for name in TORCHVISION},
    **{f"timm/{name}": _timm(name) for name in TIMM},
}

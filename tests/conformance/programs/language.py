"""Language models around their training: generation, adapters, checkpoints, embeddings."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from tests.conformance.programs.families import FAMILIES, LENGTH, VOCABULARY


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**FAMILIES["llama"][2], **changes}))


def _tokens(device: str, rows: int = 2) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=draw, device="cpu").to(device)


def generation(device: str) -> dict[str, Any]:
    """Greedy search, sampling and beams with a key-value cache."""
    model = _llama().eval().to(device)
    prompt = _tokens(device)[:, :4]
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 8, "temperature": 0.7},
        "beams": {"do_sample": False, "num_beams": 3},
    }
    found = {}
    for name, setting in settings.items():
        torch.manual_seed(5)
        found[name] = model.generate(prompt, max_new_tokens=5, pad_token_id=0, **setting).cpu()
    return found


def adapter(device: str) -> dict[str, Any]:
    """peft: a low-rank adapter, trained, saved, loaded and merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    configuration = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
    )
    model = get_peft_model(_llama(), configuration)
    model.to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = _tokens(device)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(_llama().to(device), folder)
    merged = loaded.merge_and_unload()
    logits = merged.eval()(input_ids=tokens).logits
    return {"losses": losses, "logits": logits.detach().cpu()}


def checkpoint(device: str) -> dict[str, Any]:
    """safetensors: save_pretrained of a model with tied weights, and from_pretrained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**FAMILIES["gpt2"][2])).to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = GPT2LMHeadModel.from_pretrained(folder).to(device)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    return {name: value.cpu() for name, value in loaded.state_dict().items()}


def sentence_embeddings(device: str) -> dict[str, Any]:
    """sentence-transformers' pooling and its contrastive loss over a small BERT."""
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    encoder = BertModel(BertConfig(**FAMILIES["bert"][2])).to(device)
    pooling = Pooling(32).to(device)

    class Embedding(nn.Module):
        similarity_fn_name = None

        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            states = encoder(**features).last_hidden_state
            return pooling({"token_embeddings": states, **features})

    loss = MultipleNegativesRankingLoss(Embedding())
    batches = [
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        for tokens in (_tokens(device, 3), _tokens(device, 3).flip(1))
    ]
    value = loss(batches, None)
    value.backward()
    grads = {n: p.grad.cpu() for n, p in encoder.named_parameters() if p.grad is not None}
    return {"loss": value.item(), **grads}


def x_transformer(device: str) -> dict[str, Any]:
    """x-transformers: rotary positions, an autoregressive wrapper, generation."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    decoder = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True)
    network = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=decoder)
    model = AutoregressiveWrapper(network).to(device)
    tokens = _tokens(device)
    loss = model(tokens)
    loss.backward()
    grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    torch.manual_seed(6)
    made = model.generate(tokens[:, :4], 4)
    return {"loss": loss.item(), "made": made.cpu(), **grads}


def diffusion(device: str) -> dict[str, Any]:
    """diffusers: a small U-Net learns noise, and a scheduler takes it away."""
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clean = torch.randn(2, 1, 8, 8, device=device)
    losses = []
    for _ in range(2):
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 10, (2,), device=device)
        noisy = scheduler.add_noise(clean, noise, steps)
        loss = nn.functional.mse_loss(model(noisy, steps).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sample = torch.randn(1, 1, 8, 8, device=device)
    with torch.no_grad():
        for step in scheduler.timesteps[-3:]:
            sample = scheduler.step(model(sample, step).sample, step, sample).prev_sample
    return {"losses": losses, "sample": sample.cpu()}

"""Attention, state spaces, discrete codes and label sequences: layers of other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.conformance.programs.training import Training, fit, integers, normal

TOKENS, LENGTH = 40, 16
cross_entropy = nn.functional.cross_entropy


def _language(device: str, model: nn.Module) -> Training:
    """Predict the next token."""
    model.to(device)
    tokens = integers(device, TOKENS, 2, LENGTH + 1)
    before, after = tokens[:, :-1], tokens[:, 1:]
    return fit(model, lambda: cross_entropy(model(before).transpose(1, 2), after))


def linformer(device: str) -> Training:
    """linformer: attention over projected keys and values."""
    from linformer import LinformerLM

    sizes = {"dim": 16, "seq_len": LENGTH, "depth": 2, "heads": 2, "k": 8}
    return _language(device, LinformerLM(num_tokens=TOKENS, dropout=0.1, **sizes))


def reformer(device: str) -> Training:
    """reformer-pytorch: hashed attention in reversible blocks, which run again in the backward."""
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=TOKENS, dim=16, depth=2, max_seq_len=LENGTH, heads=2, dim_head=8,
        bucket_size=4, n_hashes=2, ff_chunks=2, causal=True, lsh_dropout=0.1,
    )  # fmt: skip
    return _language(device, model)


def local_attention(device: str) -> Training:
    """local-attention: windows, and residual streams of hyper-connections."""
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=TOKENS, dim=16, depth=2, heads=2, dim_head=8, max_seq_len=LENGTH,
        local_attn_window_size=4, use_xpos=True,
    )  # fmt: skip
    return _language(device, model)


def mamba(device: str) -> Training:
    """mambapy: a selective state space with a parallel scan."""
    from mambapy.mamba import Mamba, MambaConfig

    body = Mamba(MambaConfig(d_model=8, n_layers=2, d_state=4))
    return _language(device, nn.Sequential(nn.Embedding(TOKENS, 8), body, nn.Linear(8, TOKENS)))


def rotary_embedding(device: str) -> Training:
    """rotary-embedding-torch: learned frequencies in attention."""
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=8, learned_freq=True)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            queries, keys = (self.rotary.rotate_queries_or_keys(part) for part in split[:2])
            seen = nn.functional.scaled_dot_product_attention(queries, keys, split[2])
            return self.out(seen.transpose(1, 2).flatten(2))

    body = nn.Sequential(nn.Embedding(TOKENS, 16), Attention(), nn.Linear(16, TOKENS))
    return _language(device, body)


def perceiver(device: str) -> Training:
    """perceiver-pytorch: latents that attend to an image with Fourier features."""
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=1, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=4, latent_dim=8,
        latent_heads=2, cross_dim_head=4, latent_dim_head=4, num_classes=3, attn_dropout=0.1,
    ).to(device)  # fmt: skip
    images, labels = normal(device, 4, 6, 6, 1), integers(device, 3, 4)
    return fit(model, lambda: cross_entropy(model(images), labels))


def vector_quantize(device: str) -> Training:
    """vector-quantize-pytorch: a codebook of moving averages, k-means at first, dead codes."""
    from vector_quantize_pytorch import VectorQuantize

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 6), nn.Linear(6, 8)
            self.codes = VectorQuantize(
                dim=6, codebook_size=12, decay=0.8, kmeans_init=True, threshold_ema_dead_code=2
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            quantized, _, commitment = self.codes(self.encode(x))
            return nn.functional.mse_loss(self.decode(quantized), x) + commitment.sum()

    model, inputs = Autoencoder().to(device), normal(device, 4, 10, 8)
    return fit(model, lambda: model(inputs))


def tab_transformer(device: str) -> Training:
    """tab-transformer-pytorch: attention over columns of a table."""
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(
        categories=(5, 3, 4), num_continuous=4, dim=8, dim_out=1, depth=2, heads=2, dim_head=4,
        attn_dropout=0.1, ff_dropout=0.1,
    ).to(device)  # fmt: skip
    columns, numbers = integers(device, 3, 6, 3), normal(device, 6, 4)
    targets = normal(device, 6, 1)
    return fit(model, lambda: (model(columns, numbers) - targets).square().mean())


def tabnet(device: str) -> Training:
    """pytorch-tabnet: sparsemax masks and ghost batch norm."""
    from pytorch_tabnet.tab_network import TabNet

    groups = torch.eye(8, device=device)
    model = TabNet(
        8, 3, n_d=4, n_a=4, n_steps=2, cat_idxs=[7], cat_dims=[4], cat_emb_dim=[2],
        virtual_batch_size=6, group_attention_matrix=groups,
    ).to(device)  # fmt: skip
    table = torch.cat([normal(device, 12, 7), integers(device, 4, 12, 1)], 1)
    labels = integers(device, 3, 12)

    def loss() -> torch.Tensor:
        results, sparsity = model(table)
        return cross_entropy(results, labels) - 1e-3 * sparsity

    return fit(model, loss)


def label_sequence(device: str) -> Training:
    """pytorch-crf: the likelihood of label sequences, with a mask."""
    from torchcrf import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.crf = nn.Linear(8, 5), CRF(5, batch_first=True)

        def forward(self, inputs: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
            return -self.crf(self.scores(inputs), tags, mask=mask, reduction="mean")

    model = Tagger().to(device)
    lengths = torch.tensor([7, 4, 6], device=device)
    mask = torch.arange(7, device=device) < lengths[:, None]
    inputs, tags = normal(device, 3, 7, 8), integers(device, 5, 3, 7)
    training = fit(model, lambda: model(inputs, tags))

    def state() -> dict[str, Any]:
        return {"best": model.crf.decode(model.scores(inputs), mask), **training.state()}

    return Training(training.step, state)


def low_rank_adapter(device: str) -> Training:
    """loralib: adapted layers, merged for evaluation."""
    import loralib

    merged = loralib.MergedLinear(8, 24, r=2, enable_lora=[True, False, True])
    model = nn.Sequential(
        loralib.Embedding(TOKENS, 8, r=2), merged, nn.GELU(),
        loralib.Linear(24, TOKENS, r=4, lora_dropout=0.1),
    )  # fmt: skip
    loralib.mark_only_lora_as_trainable(model)
    training = _language(device, model)

    def state() -> dict[str, torch.Tensor]:
        model.eval()  # adds the adapters to the weights
        return training.state()

    return Training(training.step, state)

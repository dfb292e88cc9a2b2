"""Every program, by name: what has to be installed for it, and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance.programs import analysis, families, frameworks, language, probability


@dataclass(frozen=True)
class Program:
    """A program that takes the device's name and returns tensors and numbers to compare."""

    run: Callable[[str], dict[str, Any]]
    #: packages as they are imported
    packages: tuple[str, ...]


PROGRAMS: dict[str, Program] = {
    **{name: Program(families.family(name), ("transformers",)) for name in families.FAMILIES},
    "Trainer": Program(frameworks.trainer, ("transformers", "accelerate")),
    "accelerate": Program(frameworks.accelerate_loop, ("accelerate",)),
    "lightning": Program(frameworks.lightning, ("lightning",)),
    "skorch": Program(frameworks.skorch, ("skorch",)),
    "ignite": Program(frameworks.ignite, ("ignite",)),
    "stable-baselines3 DQN": Program(frameworks.stable_baselines, ("stable_baselines3",)),
    "stable-baselines3 PPO": Program(frameworks.policy_gradient, ("stable_baselines3",)),
    "PyG": Program(frameworks.graph_network, ("torch_geometric",)),
    "generate": Program(language.generation, ("transformers",)),
    "peft": Program(language.adapter, ("peft", "transformers")),
    "safetensors": Program(language.checkpoint, ("safetensors", "transformers")),
    "sentence-transformers": Program(
        language.sentence_embeddings, ("sentence_transformers", "transformers")
    ),
    "x-transformers": Program(language.x_transformer, ("x_transformers",)),
    "diffusers": Program(language.diffusion, ("diffusers",)),
    "gpytorch": Program(probability.gaussian_process, ("gpytorch",)),
    "botorch": Program(probability.bayesian_optimisation, ("botorch",)),
    "pyro SVI": Program(probability.variational_inference, ("pyro",)),
    "pyro NUTS": Program(probability.hamiltonian_sampling, ("pyro",)),
    "torchdiffeq": Program(probability.differential_equation, ("torchdiffeq",)),
    "geoopt": Program(probability.manifold, ("geoopt",)),
    "torchmetrics": Program(analysis.metrics, ("torchmetrics",)),
    "captum": Program(analysis.attribution, ("captum",)),
    "kornia": Program(analysis.images, ("kornia",)),
    "entmax": Program(analysis.sparse_activation, ("entmax",)),
    "torch-ema": Program(analysis.moving_average, ("torch_ema",)),
    "torchopt": Program(analysis.meta_learning, ("torchopt",)),
    "einops": Program(analysis.tensor_notation, ("einops",)),
}

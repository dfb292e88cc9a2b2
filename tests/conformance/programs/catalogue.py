"""Every program, by name: what has to be installed for it, and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance.programs import (
    analysis,
    densities,
    families,
    frameworks,
    language,
    optimizers,
    probability,
    sequences,
    signals,
)
from tests.conformance.programs.training import Training, steps_of


@dataclass(frozen=True)
class Program:
    """A program that takes the device's name and returns tensors and numbers to compare."""

    run: Callable[[str], dict[str, Any]]
    #: packages as they are imported
    packages: tuple[str, ...]


#: Trainings of 30 steps, by package: what makes one on a device, and the package as imported.
TRAININGS: dict[str, tuple[Callable[[str], Training], str]] = {
    "adabelief-pytorch": (optimizers.adabelief, "adabelief_pytorch"),
    "e3nn": (signals.equivariance, "e3nn"),
    "ema-pytorch": (optimizers.exponential_average, "ema_pytorch"),
    "higher": (optimizers.differentiable_steps, "higher"),
    "linformer": (sequences.linformer, "linformer"),
    "lion-pytorch": (optimizers.lion, "lion_pytorch"),
    "local-attention": (sequences.local_attention, "local_attention"),
    "loralib": (sequences.low_rank_adapter, "loralib"),
    "mambapy": (sequences.mamba, "mambapy"),
    "normflows": (densities.coupling_flow, "normflows"),
    "opacus": (optimizers.private_gradients, "opacus"),
    "perceiver-pytorch": (sequences.perceiver, "perceiver_pytorch"),
    "prodigyopt": (optimizers.prodigy, "prodigyopt"),
    "ptwt": (signals.wavelets, "ptwt"),
    "pypose": (signals.poses, "pypose"),
    "pytorch-crf": (sequences.label_sequence, "torchcrf"),
    "pytorch-metric-learning": (signals.metric_learning, "pytorch_metric_learning"),
    "pytorch-minimize": (optimizers.minimizer, "torchmin"),
    "pytorch-msssim": (signals.similarity, "pytorch_msssim"),
    "pytorch-optimizer": (optimizers.soap, "pytorch_optimizer"),
    "pytorch-tabnet": (sequences.tabnet, "pytorch_tabnet"),
    "reformer-pytorch": (sequences.reformer, "reformer_pytorch"),
    "roma": (signals.rotations, "roma"),
    "rotary-embedding-torch": (sequences.rotary_embedding, "rotary_embedding_torch"),
    "schedulefree": (optimizers.schedule_free, "schedulefree"),
    "snntorch": (signals.spikes, "snntorch"),
    "tab-transformer-pytorch": (sequences.tab_transformer, "tab_transformer_pytorch"),
    "tensordict": (densities.tensor_dictionary, "tensordict"),
    "tensorly": (densities.factorisation, "tensorly"),
    "torch-dct": (signals.cosine_transform, "torch_dct"),
    "torch-optimizer": (optimizers.lookahead, "torch_optimizer"),
    "torchcde": (densities.controlled_equation, "torchcde"),
    "torchjd": (optimizers.conflicting_gradients, "torchjd"),
    "torchquad": (densities.integral, "torchquad"),
    "torchsde": (densities.stochastic_equation, "torchsde"),
    "vector-quantize-pytorch": (sequences.vector_quantize, "vector_quantize_pytorch"),
    "zuko": (densities.spline_flow, "zuko"),
}

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
    **{name: Program(steps_of(make), (package,)) for name, (make, package) in TRAININGS.items()},
}

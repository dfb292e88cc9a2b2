"""Optimizers, averages of weights, private and conflicting gradients of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.conformance.programs.training import Training, fit, integers, network, normal, weights

cross_entropy = nn.functional.cross_entropy


def _classify(
    device: str,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    after: Callable[[nn.Module], object] = lambda model: None,
) -> Training:
    """Train a small classifier with an optimizer that is made of its parameters."""
    model = network(device)
    inputs, labels = normal(device, 12, 8), integers(device, 3, 12)
    chosen = optimizer(model.parameters())
    return fit(model, lambda: cross_entropy(model(inputs), labels), chosen, lambda: after(model))


def lion(device: str) -> Training:
    """lion-pytorch: the sign of two averages."""
    from lion_pytorch import Lion

    return _classify(device, lambda parameters: Lion(parameters, lr=1e-3, weight_decay=1e-2))


def adabelief(device: str) -> Training:
    """adabelief-pytorch: rectified, with decoupled decay."""
    from adabelief_pytorch import AdaBelief

    settings = {"lr": 1e-2, "rectify": True, "weight_decay": 1e-2, "print_change_log": False}
    return _classify(device, lambda parameters: AdaBelief(parameters, **settings))


def prodigy(device: str) -> Training:
    """prodigyopt: a step size from distances, read in every step."""
    from prodigyopt import Prodigy

    settings = {"weight_decay": 1e-2, "safeguard_warmup": True, "use_bias_correction": True}
    return _classify(device, lambda parameters: Prodigy(parameters, lr=1.0, **settings))


def schedule_free(device: str) -> Training:
    """schedulefree: weights that are averaged in evaluation."""
    from schedulefree import AdamWScheduleFree

    made: list[AdamWScheduleFree] = []

    def optimizer(parameters: Iterable[nn.Parameter]) -> AdamWScheduleFree:
        made.append(AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=5))
        made[0].train()
        return made[0]

    training = _classify(device, optimizer)

    def state() -> dict[str, Any]:
        made[0].eval()
        return training.state()

    return Training(training.step, state)


def lookahead(device: str) -> Training:
    """torch-optimizer: Yogi with slow weights."""
    from torch_optimizer import Lookahead, Yogi

    return _classify(device, lambda parameters: Lookahead(Yogi(parameters, lr=1e-2), k=3))


def soap(device: str) -> Training:
    """pytorch-optimizer: Adam in the eigenbasis of a preconditioner."""
    from pytorch_optimizer import SOAP

    return _classify(device, lambda parameters: SOAP(parameters, lr=1e-2, precondition_frequency=4))


def exponential_average(device: str) -> Training:
    """ema-pytorch: a moving average of weights that begins late and is updated now and then."""
    from ema_pytorch import EMA

    model = network(device)
    average = EMA(model, beta=0.9, update_after_step=5, update_every=2)
    inputs, labels = normal(device, 12, 8), integers(device, 3, 12)
    training = fit(model, lambda: cross_entropy(model(inputs), labels), after=average.update)
    return Training(training.step, lambda: weights(average) | training.state())


def minimizer(device: str) -> Training:
    """pytorch-minimize: one iteration of BFGS with a line search in every step."""
    from torchmin import Minimizer

    model = network(device)
    inputs, labels = normal(device, 12, 8), integers(device, 3, 12)
    optimizer = Minimizer(model.parameters(), method="bfgs", max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return cross_entropy(model(inputs), labels)

    return Training(lambda: optimizer.step(closure), lambda: weights(model))


def differentiable_steps(device: str) -> Training:
    """higher: gradients through two steps of an inner optimizer."""
    import higher

    model = network(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = normal(device, 12, 8), integers(device, 3, 12)
    outer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        outer.zero_grad()
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (copy, optimizer):
            for _ in range(2):
                optimizer.step(cross_entropy(copy(inputs[:6]), labels[:6]))
            loss = cross_entropy(copy(inputs[6:]), labels[6:])
            loss.backward()
        outer.step()
        return loss

    return Training(step, lambda: weights(model))


def private_gradients(device: str) -> Training:
    """opacus: gradients of every sample, clipped, with noise."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model = network(device)
    data = TensorDataset(normal("cpu", 12, 8), integers("cpu", 3, 12))
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6), poisson_sampling=False,
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    inputs, labels = normal(device, 6, 8), integers(device, 3, 6)
    return fit(private, lambda: cross_entropy(private(inputs), labels), optimizer)


def conflicting_gradients(device: str) -> Training:
    """torchjd: the Jacobian of two losses, made one update without conflict."""
    from torchjd.aggregation import AlignedMTL
    from torchjd.autojac import backward, jac_to_grad

    model = network(device)
    inputs, labels = normal(device, 12, 8), integers(device, 3, 12)
    optimizer, aggregator = torch.optim.SGD(model.parameters(), lr=0.1), AlignedMTL()

    def step() -> torch.Tensor:
        results = model(inputs)
        losses = torch.stack([cross_entropy(results, labels), results.square().mean()])
        optimizer.zero_grad()
        backward(losses)
        jac_to_grad(model.parameters(), aggregator)
        optimizer.step()
        return losses.sum()

    return Training(step, lambda: weights(model))

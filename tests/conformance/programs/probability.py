"""Gaussian processes, Bayesian optimisation, variational inference, differential equations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _curve(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.linspace(0, 1, 12, device="cpu", dtype=torch.float64)
    return inputs.to(device), torch.sin(inputs * 6).to(device)


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in module.named_parameters()}


def gaussian_process(device: str) -> dict[str, Any]:
    """gpytorch's exact regression, trained, and its prediction."""
    import gpytorch

    class Regression(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    torch.manual_seed(0)
    x, y = _curve(device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double().to(device)
    model = Regression(x, y, likelihood).double().to(device)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = -marginal(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        prediction = likelihood(model(x + 0.03))
    return {
        "losses": losses,
        "mean": prediction.mean.cpu(),
        "variance": prediction.variance.cpu(),
        **_named(model),
    }


def bayesian_optimisation(device: str) -> dict[str, Any]:
    """botorch: a fitted model, Sobol samples, and the best of an acquisition function."""
    from botorch.acquisition import qExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.manual_seed(0)
    x, y = _curve(device)
    model = SingleTaskGP(x[:, None], y[:, None]).to(device)
    fit_gpytorch_mll(
        ExactMarginalLogLikelihood(model.likelihood, model),
        optimizer_kwargs={"options": {"maxiter": 4}},
    )
    sampler = SobolQMCNormalSampler(sample_shape=torch.Size([8]), seed=1)
    improvement = qExpectedImprovement(model, best_f=y.max(), sampler=sampler)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64, device=device)
    best, value = optimize_acqf(
        improvement, bounds=bounds, q=2, num_restarts=2, raw_samples=4, options={"maxiter": 3}
    )
    return {"best": best.cpu(), "value": value.cpu(), **_named(model)}


def variational_inference(device: str) -> dict[str, Any]:
    """pyro's stochastic variational inference with an automatic guide."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal

    x, y = (value.float() for value in _curve(device))

    def model() -> None:
        slope = pyro.sample("slope", dist.Normal(torch.zeros((), device=device), 1.0))
        offset = pyro.sample("offset", dist.Normal(torch.zeros((), device=device), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("seen", dist.Normal(slope * x + offset, 0.3), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    inference = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    losses = [inference.step() for _ in range(5)]
    values = {name: value.detach().cpu() for name, value in pyro.get_param_store().items()}
    pyro.clear_param_store()
    return {"losses": losses, **values}


def hamiltonian_sampling(device: str) -> dict[str, Any]:
    """pyro's no-U-turn sampler: many small draws and decisions in Python."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import MCMC, NUTS

    def model() -> None:
        pyro.sample("point", dist.Normal(torch.zeros(2, device=device), 1.0).to_event(1))

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    sampler = MCMC(NUTS(model, max_tree_depth=2), num_samples=3, warmup_steps=3,
                   disable_progbar=True)  # fmt: skip
    sampler.run()
    return {name: value.detach().cpu() for name, value in sampler.get_samples().items()}


def differential_equation(device: str) -> dict[str, Any]:
    """torchdiffeq's adaptive solver and its adjoint."""
    from torchdiffeq import odeint_adjoint

    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)

    class Motion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = field

        def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.field(state)

    start = torch.tensor([[1.0, 0.0]], device=device)
    times = torch.linspace(0, 1, 4, device=device)
    path = odeint_adjoint(Motion(), start, times, rtol=1e-4, atol=1e-4)
    path.square().sum().backward()
    grads = {name: p.grad.cpu() for name, p in field.named_parameters() if p.grad is not None}
    return {"path": path.detach().cpu(), **grads}


def manifold(device: str) -> dict[str, Any]:
    """geoopt: a matrix that stays orthonormal while it is optimised."""
    import geoopt

    torch.manual_seed(0)
    stiefel = geoopt.Stiefel()
    start = torch.linalg.qr(torch.randn(6, 3, dtype=torch.float64).to(device))[0]
    weight = geoopt.ManifoldParameter(start, manifold=stiefel)
    target = torch.randn(6, 3, dtype=torch.float64).to(device)
    optimizer = geoopt.optim.RiemannianAdam([weight], lr=0.1)
    losses = []
    for _ in range(3):
        loss = (weight - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weight": weight.detach().cpu()}

"""Normalizing flows, differential equations, integrals and distributions of other libraries."""

from __future__ import annotations

import torch
from torch import nn

from tests.conformance.programs.training import Training, fit, normal


def spline_flow(device: str) -> Training:
    """zuko: a neural spline flow with a context."""
    import zuko

    flow = zuko.flows.NSF(features=3, context=2, transforms=2, hidden_features=(8, 8)).to(device)
    points, context = normal(device, 10, 3), normal(device, 10, 2, seed=3)
    return fit(flow, lambda: -flow(context).log_prob(points).mean())


def coupling_flow(device: str) -> Training:
    """normflows: affine couplings, permutations and ActNorm."""
    import normflows

    base = normflows.distributions.base.DiagGaussian(2)
    flows: list[nn.Module] = []
    for _ in range(3):
        network = normflows.nets.MLP([1, 8, 2], init_zeros=True)
        flows += [normflows.flows.AffineCouplingBlock(network), normflows.flows.Permute(2, "swap")]
        flows += [normflows.flows.ActNorm(2)]
    model = normflows.NormalizingFlow(base, flows).to(device)
    points = normal(device, 12, 2)
    return fit(model, lambda: model.forward_kld(points))


def stochastic_equation(device: str) -> Training:
    """torchsde: a neural stochastic differential equation, solved with Brownian motion."""
    import torchsde

    class Motion(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.drift(state).tanh()

        def g(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.spread(state).sigmoid()

    model, start = Motion().to(device), normal(device, 4, 3)
    times = torch.linspace(0, 1, 3, device=device)

    def loss() -> torch.Tensor:
        motion = torchsde.BrownianInterval(0.0, 1.0, size=(4, 3), device=device, entropy=7)
        path = torchsde.sdeint(model, start, times, bm=motion, dt=0.25, method="euler")
        return path[-1].square().mean()

    return fit(model, loss)


def controlled_equation(device: str) -> Training:
    """torchcde: an equation that is driven by a spline through the data."""
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4 * 2)

        def forward(self, time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.linear(state).tanh().unflatten(-1, (4, 2))

    field, start = Field().to(device), normal(device, 3, 4)
    series = normal(device, 3, 6, 2, seed=3)
    coefficients = torchcde.hermite_cubic_coefficients_with_backward_differences(series)

    def loss() -> torch.Tensor:
        path = torchcde.CubicSpline(coefficients)
        ends = torchcde.cdeint(
            X=path, func=field, z0=start, t=path.interval, adjoint=False, method="rk4",
            options={"step_size": 1.0},
        )  # fmt: skip
        return ends[:, -1].square().mean()

    return fit(field, loss)


def integral(device: str) -> Training:
    """torchquad: the integral of a function that is learned."""
    from torchquad import Simpson

    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    rule, domain = Simpson(), torch.tensor([[0.0, 1.0]], device=device)

    def loss() -> torch.Tensor:
        with torch.device(device):  # grids of points are made on the default device
            area = rule.integrate(
                lambda x: model(x).squeeze(-1), dim=1, N=51, integration_domain=domain,
                backend="torch",
            )  # fmt: skip
        return (area - 2).square()

    return fit(model, loss)


def tensor_dictionary(device: str) -> Training:
    """tensordict: modules that read and write keys, with a distribution drawn from."""
    from tensordict import TensorDict
    from tensordict.nn import (
        NormalParamExtractor,
        ProbabilisticTensorDictModule,
        ProbabilisticTensorDictSequential,
        TensorDictModule,
    )
    from torch.distributions import Normal

    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), NormalParamExtractor())
    model = ProbabilisticTensorDictSequential(
        TensorDictModule(network, in_keys=["seen"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=Normal,
            default_interaction_type="random", return_log_prob=True,
        ),
    ).to(device)  # fmt: skip
    batch = TensorDict({"seen": normal(device, 64, 4)}, batch_size=[64])

    def loss() -> torch.Tensor:
        drawn = model(batch.clone())
        return (drawn["action"].square().sum(-1) + 0.1 * drawn["action_log_prob"].sum(-1)).mean()

    return fit(model, loss)


def factorisation(device: str) -> Training:
    """tensorly: a Tucker decomposition, fitted by gradients."""
    import tensorly
    from tensorly.tucker_tensor import tucker_to_tensor

    class Tucker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Parameter(torch.randn(2, 2, 2))
            self.factors = nn.ParameterList(torch.randn(size, 2) for size in (4, 5, 6))

        def forward(self) -> torch.Tensor:
            return tucker_to_tensor((self.core, list(self.factors)))

    model, target = Tucker().to(device), normal(device, 4, 5, 6)

    def loss() -> torch.Tensor:
        with tensorly.backend_context("pytorch"):
            return tensorly.norm(model() - target) ** 2

    return fit(model, loss)

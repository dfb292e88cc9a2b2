"""Training loops of frameworks: each is told the device the way its users tell it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.conformance.programs.families import BATCH, FAMILIES, LENGTH, VOCABULARY


def _classes(device: str, features: int = 8, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, features, generator=draw, device="cpu")
    labels = torch.randint(0, classes, (24,), generator=draw, device="cpu")
    return inputs.to(device), labels.to(device)


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def _language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**FAMILIES["gpt2"][2]))


@contextmanager
def _accelerate_device(device: str) -> Iterator[None]:
    """accelerate keeps its device for the process; a program wants one of its own."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()

    forget()
    with mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": device}):
        try:
            yield
        finally:
            forget()


def trainer(device: str) -> dict[str, Any]:
    """transformers.Trainer: training, a checkpoint, and training on from it."""
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (12, LENGTH), generator=draw, device="cpu")
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def one(folder: str, steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, save_steps=2,
            logging_steps=1, report_to=[], disable_tqdm=True, seed=0,
        )  # fmt: skip
        return Trainer(model=_language_model(), args=arguments, train_dataset=data)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, _accelerate_device(device):
        one(folder, 2).train()
        again = one(folder, 4)
        again.train(resume_from_checkpoint=True)
        assert again.model.device.type == device
        losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
        return {"losses": losses, **_weights(again.model)}


def accelerate_loop(device: str) -> dict[str, Any]:
    """An accelerate loop with accumulated gradients, clipping and a saved state."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, _accelerate_device(device):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = _network()
        loader = DataLoader(TensorDataset(*_classes("cpu")), batch_size=6, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss).item())
        accelerator.save_state(folder)
        before = _weights(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        after = _weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return {"losses": losses, **after}


def lightning(device: str) -> dict[str, Any]:
    """A LightningModule under a Trainer, with a checkpoint."""
    from lightning import pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = _network()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, labels = batch
            assert inputs.device.type == device
            loss = nn.functional.cross_entropy(self.network(inputs), labels)
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    model = Classifier()
    loader = DataLoader(TensorDataset(*_classes("cpu")), batch_size=6)
    with tempfile.TemporaryDirectory() as folder:
        if device == "cpu":
            where: dict[str, Any] = {"accelerator": "cpu"}
        else:
            from lazygt.integrations.lightning import LazyGTStrategy

            where = {"strategy": LazyGTStrategy()}
        fit = pl.Trainer(
            max_epochs=2, default_root_dir=folder, logger=False, enable_progress_bar=False,
            enable_model_summary=False, **where,
        )  # fmt: skip
        fit.fit(model, loader)
        fit.save_checkpoint(os.path.join(folder, "last.ckpt"))
        saved = torch.load(os.path.join(folder, "last.ckpt"), weights_only=False)["state_dict"]
    return {"losses": model.losses, **saved}


def skorch(device: str) -> dict[str, Any]:
    """skorch's scikit-learn classifier."""
    from skorch import NeuralNetClassifier

    torch.manual_seed(0)
    inputs, labels = _classes("cpu")
    net = NeuralNetClassifier(
        _network, criterion=nn.CrossEntropyLoss, max_epochs=2, lr=0.1, batch_size=6, device=device,
        train_split=None, verbose=0,
    )  # fmt: skip
    net.fit(inputs.numpy(), labels.numpy())
    return {
        "losses": net.history[:, "train_loss"],
        "chances": torch.from_numpy(net.predict_proba(inputs.numpy())),
        **_weights(net.module_),
    }


def ignite(device: str) -> dict[str, Any]:
    """ignite's trainer and evaluator with metrics."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy, Loss

    torch.manual_seed(0)
    model = _network().to(device)
    inputs, labels = _classes("cpu")
    data = list(zip(inputs.split(6), labels.split(6), strict=True))
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine = create_supervised_trainer(model, optimizer, loss, device=device)
    metrics = {"accuracy": Accuracy(device=device), "loss": Loss(loss, device=device)}
    evaluator = create_supervised_evaluator(model, metrics=metrics, device=device)
    seen: list[Any] = []

    @engine.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Any) -> None:
        evaluator.run(data)
        seen.append((engine.state.output, *evaluator.state.metrics.values()))

    engine.run(data, max_epochs=2)
    return {"seen": seen, **_weights(model)}


def stable_baselines(device: str) -> dict[str, Any]:
    """DQN on a small environment: the target network, the replay buffer, the optimizer."""
    from stable_baselines3 import DQN

    agent = DQN(
        "MlpPolicy", "CartPole-v1", seed=0, device=device, learning_starts=20, buffer_size=100,
        batch_size=8, train_freq=4, target_update_interval=16,
        policy_kwargs={"net_arch": [16]},
    )  # fmt: skip
    assert next(agent.policy.parameters()).device.type == device
    agent.learn(total_timesteps=48)
    return _weights(agent.policy)


def policy_gradient(device: str) -> dict[str, Any]:
    """PPO, whose policies draw their actions on the device."""
    from stable_baselines3 import PPO

    agent = PPO(
        "MlpPolicy", "CartPole-v1", seed=0, device=device, n_steps=16, batch_size=8, n_epochs=2,
        policy_kwargs={"net_arch": [16]},
    )  # fmt: skip
    agent.learn(total_timesteps=32)
    return _weights(agent.policy)


def graph_network(device: str) -> dict[str, Any]:
    """Two layers of PyTorch Geometric's graph convolution and attention."""
    from torch_geometric.data import Data
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(6, 8), GATConv(8, 4, heads=2)

        def forward(self, data: Any) -> torch.Tensor:
            hidden = self.first(data.x, data.edge_index).relu()
            return global_mean_pool(self.second(hidden, data.edge_index), data.batch)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(4)
    edges = torch.randint(0, 10, (2, 30), generator=draw, device="cpu")
    features = torch.randn(10, 6, generator=draw, device="cpu")
    membership = torch.arange(10, device="cpu") // 5
    data = Data(x=features, edge_index=edges, batch=membership).to(device)
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(data).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **_weights(model)}

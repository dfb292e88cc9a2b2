"""Modules and tensors that move to the workers and back stay the objects that they are."""

import copy
import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


class Tagged(nn.Parameter):
    """A user's class of parameters."""

    def doubled(self) -> torch.Tensor:
        return self * 2


class Image(torch.Tensor):
    """A user's class of tensors: what is computed of an image is one."""


class Titled(torch.Tensor):
    """A user's class that makes itself, and hands on what it knows."""

    title: str

    @staticmethod
    def __new__(cls, values: torch.Tensor, title: str) -> "Titled":
        made: Titled = torch.Tensor._make_subclass(cls, values)
        made.title = title
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        titles = [t.title for t in args if isinstance(t, Titled) and hasattr(t, "title")]
        if isinstance(result, Titled) and titles:
            result.title = titles[0]
        return result


class Wrapped(torch.Tensor):
    """A class that takes its ops in its own hands."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


def tied_model() -> nn.Sequential:
    """Batch norm between two linear layers that share their weight; made on the CPU."""
    torch.manual_seed(1)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def to(device: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As on CUDA: the optimizer's state follows when it is loaded again."""
    model.to(device)
    optimizer.load_state_dict(optimizer.state_dict())


def test_training_in_two_sessions_is_that_of_one_eager_model() -> None:
    """Ties, and an optimizer made before the move, hold there and back; so do the bits."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    eager, model = tied_model(), tied_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (eager, model)]
    parameters = list(model.parameters())
    for _ in range(2):
        with lazygt.session(launcher="inline"):
            to("lazygt", model, optimizers[1])
            losses = train(model, optimizers[1], x.to("lazygt"))
            assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
            assert model[2].weight is model[0].weight
            to("cpu", model, optimizers[1])
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert {type(p) for p in parameters} == {nn.Parameter}
        assert losses == train(eager, optimizers[0], x)
        for ours, theirs in zip(
            model.state_dict().values(), eager.state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_gradients_weak_references_and_attributes_move_along(s: lazygt.Session) -> None:
    model = tied_model()
    p = model[0].weight
    p.grad = torch.ones(4, 4, device="cpu")
    p.tag = "mine"
    grad, weak = p.grad, weakref.ref(p)
    for move, device, dtype in (
        (lambda: model.to("lazygt"), "lazygt", torch.float32),
        (model.half, "lazygt", torch.float16),
        (lambda: model.to("cpu", torch.bfloat16), "cpu", torch.bfloat16),
        (lambda: model.to("lazygt", torch.float64), "lazygt", torch.float64),
        (model.float, "lazygt", torch.float32),
        (model.cpu, "cpu", torch.float32),
    ):
        assert move() is model
        assert model[0].weight is model[2].weight is p is weak()
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad
        assert p.tag == "mine"
        assert (p.device.type, p.dtype) == (device, dtype)
        assert p.grad is grad
        assert (grad.device.type, grad.dtype) == (device, dtype)
        assert grad.tolist() == [[1.0] * 4] * 4
    assert type(grad) is torch.Tensor


def test_hooks_on_parameters_go_on_firing(s: lazygt.Session) -> None:
    model = tied_model()
    p, fired = model[0].weight, []
    removed = p.register_hook(lambda grad: fired.append("removed"))
    p.register_hook(lambda grad: fired.append(grad.device.type))
    p.register_post_accumulate_grad_hook(lambda t: fired.append(t is p))
    removed.remove()
    for device in ("lazygt", "cpu", "lazygt"):
        model.to(device)
        model(torch.ones(2, 4, device=device)).sum().backward()
        assert fired == [device, True]
        fired.clear()


def test_an_exception_in_a_hook_from_before_the_move_reaches_the_user(s: lazygt.Session) -> None:
    model = tied_model()
    model[0].weight.register_hook(lambda grad: 1 / 0)
    model.to("lazygt")
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4)).sum().backward()


def test_buffers_are_new_tensors_as_on_cuda(s: lazygt.Session) -> None:
    model = tied_model()
    mean = model[1].running_mean
    model.to("lazygt")
    assert mean.device.type == "cpu"
    assert model[1].running_mean.device.type == "lazygt"


def test_data_takes_values_of_the_other_device(s: lazygt.Session) -> None:
    p = nn.Parameter(torch.ones(2, device="cpu"))
    t = torch.ones(2, device="cpu")
    for x, kind in ((p, nn.Parameter), (t, torch.Tensor)):
        x.data = x.data.to("lazygt")
        assert (x + 1).tolist() == [2, 2]
        assert isinstance(x, nn.Parameter) == (x is p)
        x.data = x.data.cpu()
        assert type(x) is kind
        x.data = torch.zeros(3, device="lazygt")  # of another shape
        assert x.tolist() == [0, 0, 0]


def test_parameters_made_in_a_session_become_plain_ones_on_the_cpu() -> None:
    with lazygt.session(launcher="inline"):
        layer = nn.Linear(2, 2)
        p = layer.weight
        layer.cpu()
    assert type(p) is nn.Parameter
    assert layer.weight is p
    layer(torch.ones(1, 2)).sum().backward()
    assert p.grad is not None


@pytest.mark.parametrize("there", ["cpu", "lazygt"])
def test_a_backward_of_before_the_move_says_so(s: lazygt.Session, there: str) -> None:
    model = tied_model().to("cpu" if there == "lazygt" else "lazygt")
    loss = model(torch.ones(2, 4, device=model[0].weight.device)).sum()
    model.to(there)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before module.to"):
        loss.backward()
    assert model[0].weight.grad is None


def test_parameter_subclass_is_preserved(s: lazygt.Session) -> None:
    module = nn.Module()
    module.p = p = Tagged(torch.ones(2, device="cpu"))
    module.to("lazygt")
    assert module.p is p
    assert isinstance(p, Tagged)
    p.doubled().sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [2, 2]
    assert isinstance(copy.deepcopy(module).p, Tagged)
    module.cpu()
    assert type(p) is Tagged
    assert isinstance(Tagged(torch.ones(2)), Tagged)
    assert type(p)(torch.ones(2, device="cpu"), requires_grad=False).doubled().tolist() == [2, 2]


def test_vmap_makes_parameters_and_copies_modules(s: lazygt.Session) -> None:
    module, rows = nn.Linear(2, 3), torch.randn(4, 3, 2)

    def answer(row: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(row) + Tagged(row) * copy.deepcopy(module).weight

    expected = rows + rows * module.weight
    assert torch.equal(torch.vmap(answer)(rows), expected)
    gradients = torch.func.grad(lambda row: answer(row).sum())(rows[0])
    assert torch.equal(gradients, torch.zeros(3, 2))  # parameters are leaves of their own


def test_modules_that_torch_handles_in_ways_of_its_own(s: lazygt.Session) -> None:
    with torch.device("cpu"):
        modules = [
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
            nn.LSTM(3, 3),
        ]
    for module in modules:
        before = list(module.parameters())
        out = module.to("lazygt")(torch.ones(2, 3))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        module.cpu()(torch.ones(2, 3, device="cpu"))
        assert [id(p) for p in module.parameters()] == [id(p) for p in before]


def test_lazy_layers_take_their_shape_on_the_workers(s: lazygt.Session) -> None:
    for device in ("cpu", "lazygt"):
        with torch.device(device):
            model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        model.to("lazygt")(torch.ones(2, 3)).sum().backward()
        assert model[0].weight.shape == (4, 3)
        assert {p.device.type for p in model.parameters()} == {"lazygt"}
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_modules_move(s: lazygt.Session) -> None:
    with torch.device("cpu"):
        script = torch.jit.script(nn.Linear(3, 2))
    assert script.to("lazygt").weight.device.type == "lazygt"
    assert script(torch.ones(1, 3)).shape == (1, 2)
    script.cpu()(torch.ones(1, 3, device="cpu"))


def test_torch_may_be_told_to_swap_or_to_make_new_parameters(s: lazygt.Session) -> None:
    swap = torch.__future__.set_swap_module_params_on_conversion
    overwrite = torch.__future__.set_overwrite_module_params_on_conversion
    for choose, same in ((swap, True), (overwrite, False)):
        choose(True)
        try:
            model = tied_model()
            p = model[0].weight
            model.to("lazygt")
            assert (model[0].weight is p) == same
            model(torch.ones(2, 4)).sum().backward()
        finally:
            choose(False)


def test_load_by_assignment_uses_loaded_tensors(s: lazygt.Session) -> None:
    model = tied_model().to("lazygt")
    state = tied_model().state_dict()
    model.load_state_dict({name: t.to("lazygt") for name, t in state.items()}, assign=True)
    assert model(torch.ones(2, 4)).device.type == "lazygt"
    model.load_state_dict(state, assign=True)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()


def test_saved_modules_load_as_plain_modules(s: lazygt.Session) -> None:
    model = tied_model().to("lazygt")
    model[0].weight.tag = "mine"
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded[0].weight) is nn.Parameter
    assert loaded[0].weight is loaded[2].weight
    assert vars(loaded[0].weight) == {"tag": "mine"}


def test_torch_is_as_before_after_a_session() -> None:
    before = [torch.Tensor.data, nn.Parameter.__new__, torch.jit.ScriptModule._apply]
    with lazygt.session(launcher="inline"):
        assert torch.Tensor.data is not before[0]
    assert before == [torch.Tensor.data, nn.Parameter.__new__, torch.jit.ScriptModule._apply]


# -- the user's own classes ------------------------------------------------------------------


def test_as_subclass(s: lazygt.Session) -> None:
    x = torch.arange(3.0, requires_grad=True)
    image = x.as_subclass(Image)
    brighter = image + 1
    assert isinstance(brighter, Image)
    assert brighter.tolist() == [1, 2, 3]
    assert str(brighter.detach()) == "Image([1., 2., 3.], device='lazygt:0')"
    assert type(brighter.cpu()) is Image
    assert isinstance(brighter.cpu().to("lazygt"), Image)
    assert not isinstance(brighter.as_subclass(torch.Tensor), Image)
    assert isinstance(copy.deepcopy(image.detach()), Image)
    (image * image).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 4]


def test_a_class_with_a_torch_function_of_its_own(s: lazygt.Session) -> None:
    for values in (torch.ones(3), torch.ones(3, device="cpu")):
        tensor = Titled(values, "mine")
        for made in (
            tensor + 1,
            tensor.to("lazygt"),
            tensor.cpu(),
            nn.Linear(3, 2).cpu()(tensor.cpu()),
        ):
            assert isinstance(made, Titled)
            assert made.title == "mine"
    file = io.BytesIO()
    torch.save(Titled(torch.ones(3), "mine"), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Titled
    assert loaded.title == "mine"
    assert loaded.device.type == "cpu"


def test_a_class_with_ops_of_its_own_is_refused(s: lazygt.Session) -> None:
    with pytest.raises(TypeError, match=r"Wrapped: a class for it derives from torch\.Tensor"):
        torch.ones(2).as_subclass(Wrapped)


@pytest.mark.parametrize("there", ["lazygt", "cpu"])
def test_a_move_that_torch_refuses_moves_nothing(s: lazygt.Session, there: str) -> None:
    here = {"lazygt": "cpu", "cpu": "lazygt"}[there]
    p = nn.Parameter(torch.ones(2, device=here))
    with pytest.raises(RuntimeError, match="floating point or complex dtype"):
        p.data = torch.ones(2, dtype=torch.int32, device=there)
    assert p.device.type == here
    assert p.tolist() == [1, 1]


def test_a_gradient_that_is_not_dense_stays_with_its_parameter(s: lazygt.Session) -> None:
    p = nn.Parameter(torch.ones(2, device="cpu"))
    p.grad = torch.ones(2, device="cpu").to_sparse()
    with pytest.raises(NotImplementedError, match=r"layout torch.sparse_coo.*set .grad = None"):
        p.data = p.data.to("lazygt")
    assert p.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("there", ["lazygt", "cpu"])
def test_a_gradient_with_a_graph_moves_along(s: lazygt.Session, there: str) -> None:
    here = {"lazygt": "cpu", "cpu": "lazygt"}[there]
    module = nn.Linear(2, 1, bias=False).to(here)
    module.weight.data.fill_(3)
    (module.weight**2).sum().backward(create_graph=True)
    grad = module.weight.grad
    module.to(there)
    assert module.weight.grad is grad
    assert grad is not None
    assert grad.device.type == there
    assert (module.weight.tolist(), grad.tolist()) == ([[3, 3]], [[6, 6]])


def test_the_class_of_a_tensor_makes_tensors(s: lazygt.Session) -> None:
    t = torch.ones(2)
    made = type(t)([1.0, 2.0])
    assert (made.tolist(), made.requires_grad) == ([1, 2], False)
    assert type(t)(2, 3).shape == (2, 3)
    assert type(nn.Parameter(t))(t).requires_grad

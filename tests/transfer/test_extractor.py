"""Extractors: order, modules, ties, casts; from modules, mappings and sessions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazygt
from lazygt.transfer import Chunk, ModuleExtractor
from tests.transfer.child import RECEIVERS, SENDERS, checksums


class Net(nn.Module):
    """Two layers tied to each other, a buffer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def flat(chunks: list[Chunk]) -> list[str]:
    return [spec.name for chunk in chunks for spec, _ in chunk.params]


def test_chunks_follow_the_modules() -> None:
    made = list(ModuleExtractor(Net()).chunks())
    assert [chunk.module for chunk in made] == ["embed", "body.0", "body.1"]
    assert flat(made) == [
        "embed.weight",
        "body.0.weight",
        "body.0.bias",
        "body.1.weight",
        "body.1.bias",
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
    ]


def test_chunks_and_manifest_agree() -> None:
    extractor = ModuleExtractor(Net())
    own = [spec for spec in extractor.manifest().params if spec.alias_of is None]
    assert [spec for chunk in extractor.chunks() for spec, _ in chunk.params] == own


def test_ties_are_found_and_lookalikes_are_not() -> None:
    shared = torch.arange(12.0)
    model = {
        "a": shared.view(3, 4),
        "b": shared.view(3, 4),
        "turned": shared.view(4, 3).t(),
        "part": shared[:4],
        "other": shared.clone().view(3, 4),
        "none": torch.empty(0),
        "nothing": torch.empty(0),
    }
    ties = {spec.name: spec.alias_of for spec in ModuleExtractor(model).manifest().params}
    assert ties == {**dict.fromkeys(model), "b": "a"}


def test_a_conjugate_of_the_same_memory_is_no_tie() -> None:
    values = torch.randn(3, dtype=torch.complex64)
    model = {
        "values": values,
        "conjugate": values.conj(),
        "again": values.conj(),
        "imag": values.imag,
        "negative": values.conj().imag,
    }
    ties = {spec.name: spec.alias_of for spec in ModuleExtractor(model).manifest().params}
    assert ties == {**dict.fromkeys(model), "again": "conjugate"}


def test_groups_and_names_can_be_chosen() -> None:
    extractor = ModuleExtractor(
        Net(), group=lambda name: name.split(".")[0], rename=lambda name: f"model.{name}"
    )
    made = list(extractor.chunks())
    assert [chunk.module for chunk in made] == ["embed", "body"]
    assert all(name.startswith("model.") for name in flat(made))
    assert extractor.manifest().params[-1].alias_of == "model.embed.weight"


def test_the_first_pattern_decides_and_integers_stay() -> None:
    cast = {"body.1.*": torch.float64, "*": torch.float16}
    specs = {spec.name: spec for spec in ModuleExtractor(Net(), cast=cast).manifest().params}
    assert specs["body.1.weight"].dtype == "F64"
    assert specs["body.0.weight"].dtype == specs["head.weight"].dtype == "F16"
    assert specs["body.1.num_batches_tracked"].dtype == "I64"


def test_tied_weights_must_be_cast_alike() -> None:
    with pytest.raises(ValueError, match=r"head.weight is tied to embed.weight, but the casts"):
        ModuleExtractor(Net(), cast={"head.*": torch.float16}).manifest()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "on device meta"),
        ("text", "a str and no tensor"),
        (torch.empty(1, dtype=torch.uint4), "does not travel"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
def test_unsupported_tensor_is_named(tensor: object, says: str) -> None:
    with pytest.raises(TypeError, match=rf"parameter 'w' is .*{says}"):
        ModuleExtractor({"w": tensor}).manifest()  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [torch.complex32, "bfloat16"])
def test_a_cast_is_to_a_dtype_that_travels(dtype: object) -> None:
    with pytest.raises(TypeError, match=rf"cast '\*.weight' to {dtype!r}: that is no dtype"):
        ModuleExtractor(Net(), cast={"*.weight": dtype})  # type: ignore[dict-item]


def test_object_that_is_no_model_is_refused() -> None:
    with SENDERS["shared-memory"]() as sender, pytest.raises(TypeError, match="of a list: expect"):
        lazygt.transfer_weights([torch.ones(3)], sender)


def test_each_transfer_reads_the_module_anew() -> None:
    net = Net()
    extractor = ModuleExtractor(net)
    before = extractor.manifest()
    net.body[0] = nn.Linear(4, 5)
    assert extractor.manifest() != before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", list(SENDERS))
def test_a_session_trains_and_sends(strategy: str) -> None:
    torch.manual_seed(0)
    with lazygt.session(launcher="inline"), SENDERS[strategy]() as sender:
        net = Net()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with RECEIVERS[strategy](sender.address) as receiver:
            sender.wait_for_receivers(1, 10.0)
            for version in (1, 2):
                out = net.head(net.body(net.embed(torch.arange(6))))
                nn.functional.cross_entropy(out, torch.arange(6)).backward()
                opt.step()
                opt.zero_grad()
                expected = {name: value.cpu() for name, value in net.state_dict().items()}
                report = lazygt.transfer_weights(net, sender, timeout=20.0)
                assert (report.version, report.aliases) == (version, 1)
                with receiver.reading() as (number, params):
                    assert number == version
                    assert params["head.weight"] is params["embed.weight"]
                    assert checksums(params) == checksums(expected)


@pytest.mark.timeout(60)
def test_a_session_casts_where_the_weights_are() -> None:
    with lazygt.session(launcher="inline") as s:
        net = nn.Linear(256, 256)
        extractor = ModuleExtractor(net, cast={"weight": torch.bfloat16})
        before = s.stats()["bytes_fetched"]
        ((weight, bias),) = [[t for _, t in chunk.params] for chunk in extractor.chunks()]
        fetched = s.stats()["bytes_fetched"] - before
        assert (weight.dtype, bias.dtype) == (torch.bfloat16, torch.float32)
        assert weight.device.type == "cpu"
        assert fetched == 256 * 256 * 2 + 256 * 4
        assert torch.equal(weight, net.weight.detach().cpu().to(torch.bfloat16))


@pytest.mark.timeout(60)
def test_a_module_can_be_loaded() -> None:
    torch.manual_seed(0)
    source, target = Net(), Net()
    with SENDERS["shared-memory"]() as sender:
        expect = ModuleExtractor(target).manifest()
        with RECEIVERS["shared-memory"](sender.address, expect=expect) as receiver:
            sender.wait_for_receivers(1, 10.0)
            lazygt.transfer_weights(source, sender, timeout=20.0)
            assert receiver.load_into(target) == 1
            assert checksums(target.state_dict()) == checksums(source.state_dict())

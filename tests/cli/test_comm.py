"""``lazygt comm``: the worked cases, and what it says where it is asked wrongly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from lazygt.cli.app import app

DATA = ["--params", "7e9", "--dtype", "fp32", "--dp", "8"]
THIRTEEN = [
    "--params", "13B", "--dtype", "fp32", "--activations", "bf16", "--dp", "64", "--tp", "8",
    "--layers", "40", "--hidden", "5120", "--batch", "32", "--sequence", "4096",
]  # fmt: skip


def comm(*args: str) -> Any:
    result = CliRunner().invoke(app, ["comm", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_data_parallel() -> None:
    result = comm(*DATA)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "One step; 7 G parameters in fp32 are 28 GB."
    assert lines[-1].split() == [
        "data", "8", "all_reduce", "gradients", "1", "7", "G", "28", "GB", "56", "GB", "49", "GB",
    ]  # fmt: skip


def test_data_and_tensor_parallel() -> None:
    numbers = json.loads(comm(*THIRTEEN, "--json").stdout)["by_parallelism"]
    assert numbers["data"]["ring_limit"] == 104_000_000_000
    elements = 4 * 32 * 4096 * 5120 * 40
    assert numbers["tensor"]["logical"] == 2 * elements
    assert numbers["tensor"]["ring_limit"] == 4 * elements == 429_496_729_600
    assert numbers["tensor"]["ring_of_rank"] == 4 * elements * 7 // 8


def test_the_cases_of_tensor_and_pipeline_parallel() -> None:
    """4 B S H L are 17.2e9 elements, and a boundary has 134e6, three of them 402e6; in bf16."""
    sizes = ["--layers", "32", "--hidden", "4096", "--batch", "16", "--sequence", "2048"]
    told = comm("--params", "7e9", "--dtype", "bf16", "--tp", "8", "--pp", "4", *sizes, "--json")
    numbers = json.loads(told.stdout)["by_parallelism"]
    assert numbers["tensor"]["logical"] == 34_359_738_368
    assert numbers["tensor"]["ring_limit"] == 68_719_476_736
    assert numbers["pipeline"]["logical"] == 2 * 2 * 402_653_184
    assert numbers["pipeline"]["ring_of_rank"] == 2 * 2 * 134_217_728


def test_long_contexts_and_microbatches() -> None:
    sizes = ["--layers", "32", "--hidden", "4096", "--batch", "1", "--sequence", "131072"]
    args = ["--params", "8e9", "--dtype", "bf16", "--cp", "8", "--kv-hidden", "1024", *sizes]
    elements = 131072 * 1024 * 32
    for attention, logical in (("ring", 6 * elements), ("ulysses", 4 * 5 * elements)):
        told = comm(*args, "--attention", attention, "--microbatches", "4", "--json")
        numbers = json.loads(told.stdout)["by_parallelism"]
        assert numbers["context"]["logical"] == 4 * 2 * logical
        assert numbers["data"]["logical"] == 16_000_000_000
    assert "keys, values, forward" in comm(*args).stdout


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ("data=104GB", "data=104 GB holds for a ring of many ranks"),
        ("data=12.8GB", "data=12.8 GB is what one rank sends in the ring"),
        ("data=52GB", "mistake 3: data=52 GB is the payload, and forgets the ring: logical 52 GB"),
        ("data=26GB", "data=26 GB is a number of elements, and no bytes"),
        ("tensor=429GB", "tensor=429 GB holds for a ring of many ranks"),
        ("tensor=214.7GB", "forgets the ring, or is a number of elements and no bytes"),
        ("tensor=17.2TB", "tensor=17.2 TB is wrong: logical 215 GB, 429 GB in a ring"),
    ],
)
def test_claim_is_judged(claim: str, text: str) -> None:
    result = comm(*THIRTEEN, "--claim", claim)
    assert result.exit_code == 0, result.output
    assert text in result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*DATA, "--params", "many"], "--params many: expected how many there are, such as 7e9 or"),
        ([*DATA, "--params", "0"], "--params 0: expected how many there are"),
        ([*DATA, "--dtype", "fp31"], "--dtype fp31: it is one of fp64, fp32"),
        ([*DATA, "--activations", "x"], "--activations x: it is one of"),
        ([*DATA, "--dp", "0"], "Invalid value for '--dp'"),
        ([*DATA, "--dp", "1"], "one rank sends nothing: give --dp, --tp, --pp, --cp or --ep"),
        ([*DATA, "--dp", "1", "--zero", "3"], "give --dp, such as --dp 8"),
        ([*DATA, "--tp", "8"], "give --layers, --hidden, --batch, --sequence, too"),
        ([*DATA, "--pp", "8", "--hidden", "9"], "give --batch, --sequence, too"),
        ([*THIRTEEN, "--pp", "41"], "--pp 41: there are only 40 layers to cut"),
        ([*DATA, "--cp", "2"], "give --layers, --hidden, --batch, --sequence, too"),
        ([*THIRTEEN, "--cp", "9999"], "--cp 9999: there are only 4096 places to cut"),
        ([*THIRTEEN, "--cp", "2", "--kv-hidden", "6000"], "keys have at most H, 5120"),
        ([*DATA, "--attention", "flash"], "Invalid value for '--attention'"),
        ([*DATA, "--microbatches", "0"], "Invalid value for '--microbatches'"),
        ([*DATA, "--claim", "tensor=1GB"], "--claim: a claim of 'tensor': what is exchanged is of"),
        ([*DATA, "--claim", "data=1"], "expected a kind of parallelism and bytes, such as data="),
        (["--params", "7e9", "--dp", "8"], "Missing option '--dtype'"),
    ],
)
def test_invalid_input_is_refused(args: list[str], message: str) -> None:
    result = comm(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not result.stdout

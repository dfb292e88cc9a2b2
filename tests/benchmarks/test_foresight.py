"""Tables of measured runs: read, built as programs, graded, and fitted.

Nothing here is measured: what is predicted is set beside formulas, and beside the simulation of the
whole program that it is put together of.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks import foresight
from benchmarks.foresight import errors, grade, summary
from benchmarks.foresight_fit import chosen_rows, fitted
from benchmarks.foresight_rows import Row, TableError, read_table
from benchmarks.foresight_simulated import (
    Programs,
    activation_bytes,
    programs_key,
    recorded,
    step_seconds,
)
from lazygt.machine import machine_of
from tests.support.timeouts import DEEP

pytestmark = pytest.mark.timeout(300)

HEADER = "layers,hidden,heads,vocabulary,sequence,gpus,machine,global_batch,microbatch,seconds"
SMALL = "4,256,4,512,128,1,a100-80,8,2,1"


def table(tmp_path: Path, row: str, header: str = HEADER) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(f"# a comment\n{header}\n{row}\n")
    return path


def small(tmp_path: Path, **changes: object) -> Row:
    (row,) = read_table(table(tmp_path, SMALL))
    return replace(row, **changes)  # type: ignore[arg-type]


@cache
def programs(key: Row) -> Programs:
    return Programs.of(key)


def predicted(row: Row) -> float:
    machine = machine_of(row.machine)
    return step_seconds(row, programs(programs_key(row)).times(machine), machine)


# -- reading ---------------------------------------------------------------------------------------


def test_table_defaults_are_filled_in(tmp_path: Path) -> None:
    row = small(tmp_path)
    assert (row.model.ffn, row.model.kv_heads, row.model.dropout) == (1024, 4, 0.1)
    assert (row.dp, row.tp, row.pp, row.hosts, row.microbatches) == (1, 1, 1, 1, 4)
    assert (row.sharding, row.recompute, row.attention) == ("none", "none", "unfused")


def test_flops_are_those_of_megatrons_formula(tmp_path: Path) -> None:
    layers, hidden, words, sequence = 24, 2304, 51200, 2048
    text = f"{layers},{hidden},24,{words},{sequence},32,a100-80,512,16,137"
    path = table(tmp_path, text, HEADER.replace("seconds", "TFLOP/s/GPU"))
    (row,) = read_table(path)
    formula = (
        72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + words / (12 * layers * hidden))
    )
    assert row.model.flops_per_token(recomputed=False) == pytest.approx(formula)
    assert row.seconds == pytest.approx(512 * sequence * formula / (137e12 * 32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("global_batch", "batches"), "there is no column global_batch"),
        (("256,", "many,"), "hidden is 'many', expected a number"),
        (("256,", ",", "4,256", "4,"), "hidden is empty"),
        (("256,4", "256,5"), "hidden 256 does not divide by heads 5"),
        (("8,2,1", "7,2,1"), "global_batch 7 is no multiple of dp x microbatch"),
        ((",1\n", ",\n"), "nothing was measured"),
    ],
)
def test_table_error_names_row_and_mistake(
    tmp_path: Path, change: tuple[str, ...], says: str
) -> None:
    path = table(tmp_path, SMALL)
    path.write_text(path.read_text().replace(*change[:2]))
    with pytest.raises(TableError, match=says):
        read_table(path)


def test_ranks_that_do_not_multiply_to_the_gpus_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path, f"{SMALL},2,2", f"{HEADER},dp,tp")
    with pytest.raises(TableError, match=r"row 1: dp 2 x tp 2 x pp 1 is not gpus 1"):
        read_table(path)


# -- what is put together --------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_step_put_together_is_the_step_simulated_whole(tmp_path: Path, recompute: str) -> None:
    row = small(tmp_path, recompute=recompute)
    whole = recorded(row, row.model.layers, row.microbatches)
    seconds = whole.rehearsal.on(machine_of(row.machine)).seconds
    assert predicted(row) == pytest.approx(seconds, rel=0.02)


def test_blocks_that_are_gathered_for_each_microbatch_are_put_together_too(tmp_path: Path) -> None:
    wide = replace(small(tmp_path).model, hidden=2048, ffn=8192, heads=16)
    row = small(tmp_path, model=wide, gpus=4, dp=4, global_batch=24, sharding="fsdp")
    whole = recorded(row, row.model.layers, row.microbatches)
    seconds = whole.rehearsal.on(machine_of(row.machine)).seconds
    assert predicted(row) == pytest.approx(seconds, rel=0.05)


def test_a_pipeline_waits_for_the_stages_before_it(tmp_path: Path) -> None:
    """(microbatches + stages - 1) / microbatches of one stage's time, where nothing else counts."""
    row = small(tmp_path, gpus=2, pp=2, global_batch=64)
    times = programs(programs_key(row)).times(machine_of(row.machine))
    middle = times.alone._replace(ends=0.0, once=0.0, once_a_layer=0.0)
    of_block = 32 * 2 * middle.block
    without_sends = machine_of(row.machine).with_values(
        {f"collectives.local[0].{what}": 0.0 for what in ("latency", "each")}
        | {"collectives.local[0].bandwidth": 1e15}
    )
    took = step_seconds(row, times._replace(alone=middle), without_sends)
    assert took == pytest.approx(of_block * (32 + 1) / 32, rel=1e-4)
    twice = step_seconds(replace(row, interleave=2), times._replace(alone=middle), without_sends)
    assert twice == pytest.approx(of_block * (32 + 0.5) / 32, rel=1e-4)


@pytest.mark.parametrize(
    ("tp", "by_formula"),
    [
        (1, lambda a, s, h: 10 + 24 + 5 * a * s / h),
        (2, lambda a, s, h: 10 + 24 / 2 + 5 * a * s / (h * 2)),
    ],
)
def test_layer_activation_bytes_follow_korthikanti(tmp_path: Path, tp, by_formula) -> None:  # type: ignore[no-untyped-def]
    """Bytes a layer over sequence x batch x hidden (arXiv 2205.05198, equations 1 and 2)."""
    row = small(tmp_path, gpus=tp, tp=tp, precision="bf16")
    model = row.model
    expected = by_formula(model.heads, model.sequence, model.hidden)
    expected *= model.layers * row.microbatch * model.sequence * model.hidden
    kept = activation_bytes(row, programs(programs_key(row)))
    assert kept == pytest.approx(expected, rel=0.02)


def test_a_recomputed_layer_keeps_its_input(tmp_path: Path) -> None:
    row = small(tmp_path, recompute="full")
    model = row.model
    expected = 2 * model.layers * row.microbatch * model.sequence * model.hidden
    assert activation_bytes(row, programs(programs_key(row))) == pytest.approx(expected, rel=0.02)


# -- fitting and printing --------------------------------------------------------------------------


def test_a_fit_finds_the_constants_that_rows_were_made_with(tmp_path: Path) -> None:
    row = small(
        tmp_path, model=replace(small(tmp_path).model, hidden=4096, ffn=16384, sequence=512)
    )
    rows = [replace(row, global_batch=count) for count in (2, 4, 8)]
    machine = machine_of("a100-80")
    slower = machine.with_values({
        key: 0.6 * machine.figures[key].value for key in ("matmul.rate.f16", "matmul.rate.bf16")
    })  # fmt: skip
    measured = [
        replace(row, seconds=graded.seconds)
        for row, graded in zip(rows, grade(rows, {"a100-80": slower}), strict=True)
    ]
    assert min(errors(grade(measured, {"a100-80": machine}))) < -0.2
    fit = fitted(machine, measured)
    assert max(map(abs, errors(grade(measured, {"a100-80": fit})))) < 0.02
    assert fit.figures["matmul.rate.bf16"].value == pytest.approx(
        slower.figures["matmul.rate.bf16"].value, rel=0.1
    )
    assert fit.figures["matmul.rate.bf16"].source == "fit"
    assert fit.figures["matmul.peak.bf16"] == machine.figures["matmul.peak.bf16"]


def test_processes_share_the_work_and_change_nothing(tmp_path: Path) -> None:
    row = small(tmp_path)
    rows = [replace(row, microbatch=count, line=count) for count in ((1, 2, 4) if DEEP else (2, 4))]
    machines = {"a100-80": machine_of("a100-80")}
    assert grade(rows, machines, jobs=2) == grade(rows, machines)


def test_some_rows_of_each_machine_are_chosen(tmp_path: Path) -> None:
    row = small(tmp_path)
    rows = [
        replace(row, machine=name, line=line) for name in ("h100", "b200") for line in range(10)
    ]
    chosen = chosen_rows(rows, 0.2, seed=0)
    assert sorted(row.machine for row in chosen) == ["b200"] * 2 + ["h100"] * 2
    assert chosen_rows(rows, 0.2, seed=0) == chosen


def test_command_prints_table_and_prediction_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path, SMALL)
    monkeypatch.setattr(sys, "argv", ["foresight", "--table", str(path)])
    foresight.main()
    printed = capsys.readouterr().out
    assert "4 x 256" in printed
    assert "time of 1 runs: off by" in printed
    path.write_text("layers\n3\n")
    with pytest.raises(SystemExit, match="there is no column"):
        foresight.main()


def test_the_summary_is_of_sizes() -> None:
    assert summary([0.1, -0.3]) == (
        "off by 20.0% in the mean, 20.0% in the median, 30.0% at the 90th percentile"
    )

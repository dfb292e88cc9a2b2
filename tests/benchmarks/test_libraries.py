"""The benchmark of other libraries' programs times those that are installed."""

from __future__ import annotations

import argparse

import pytest
from torch import nn

from benchmarks import libraries
from tests.conformance.programs.training import Training, fit, integers, network, normal

pytestmark = pytest.mark.timeout(120)


def classifier(device: str) -> Training:
    model = network(device)
    inputs, labels = normal(device, 6, 8), integers(device, 3, 6)
    return fit(model, lambda: nn.functional.cross_entropy(model(inputs), labels))


def test_installed_libraries_are_rows_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"here": (classifier, "torch"), "absent": (classifier, "no_such_package")}
    monkeypatch.setattr(libraries, "TRAININGS", made)
    report = libraries.measure(argparse.Namespace(only=None, compile="off", rounds=1))
    assert [row[0] for row in report.rows] == ["here"]
    assert report.remarks == ["absent is not installed"]

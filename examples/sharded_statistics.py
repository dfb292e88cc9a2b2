"""Statistics of a real data set whose rows lie on several workers.

    python examples/sharded_statistics.py                # two workers
    python examples/sharded_statistics.py --workers 4    # the same numbers

scikit-learn's 569 measured tumours with 30 features each are cut by rows; every worker has some,
and none has all. Each statistic is written as for one device. What the workers exchange is listed
below the numbers: values of the size of the result, not of the data; only the median moves rows.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.distributed.tensor import Shard

import lazygt

#: In standard deviations from the mean.
EDGES = (-2.0, -1.0, 0.0, 1.0, 2.0)
SHOWN = 8


def standardised(x: Tensor) -> Tensor:
    """Columns with mean 0 and standard deviation 1."""
    return (x - x.mean(0)) / x.std(0)


def histogram(x: Tensor) -> Tensor:
    """How many values of each column lie below each of EDGES, and in all: [edges + 1, columns]."""
    z = standardised(x)
    below = [(z < edge).sum(0) for edge in (*EDGES, float("inf"))]
    return torch.stack(below)


def correlation(x: Tensor) -> Tensor:
    """Of each column with each other one: [columns, columns]."""
    z = standardised(x)
    return z.T @ z / (len(x) - 1)


def components(x: Tensor) -> Tensor:
    """The part of the variance along each principal axis, the largest first: [columns]."""
    along = torch.linalg.eigvalsh(correlation(x)).flip(0)
    return along / along.sum()


def regression(x: Tensor, y: Tensor) -> Tensor:
    """Least squares by the normal equations: [columns + 1], the constant last."""
    z = standardised(x)
    z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)
    return torch.linalg.solve(z.T @ z, z.T @ y)


#: What is computed of the rows [n, columns] and their labels [n].
STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y: x.mean(0),
    "std": lambda x, y: x.std(0),
    "min": lambda x, y: x.amin(0),
    "max": lambda x, y: x.amax(0),
    "median": lambda x, y: x.median(0).values,
    "histogram": lambda x, y: histogram(x),
    "correlation": lambda x, y: correlation(x),
    "principal axes": lambda x, y: components(x),
    "regression": regression,
}


@dataclass(frozen=True)
class Statistic:
    """A result, and what it took.

    Attributes:
        value: on the client.
        collectives: what the workers exchanged.
        fetched: bytes that reached the client.
    """

    value: np.ndarray[Any, Any]
    collectives: tuple[Any, ...]
    fetched: int


def measure(session: lazygt.Session, compute: Callable[[], Tensor]) -> Statistic:
    """Compute one statistic and read it."""
    before = session.stats()["bytes_fetched"]
    value = compute().cpu().numpy()
    assert session.last_plan is not None
    after = session.stats()["bytes_fetched"]
    return Statistic(value, session.last_plan.collectives, after - before)


def statistics(rows: Tensor, labels: Tensor, workers: int) -> dict[str, Statistic]:
    """All of them, of rows that are cut over the workers."""
    with lazygt.session(mesh={"rows": workers}) as session:
        # Pinned: so few rows would be faster gathered once than summed several times.
        x, y = (
            lazygt.distribute(one.to("lazygt"), {"rows": Shard(0)}, fixed=True)
            for one in (rows, labels)
        )
        session.flush()
        return {name: measure(session, partial(f, x, y)) for name, f in STATISTICS.items()}


def check(found: dict[str, Statistic], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    """Compare with numpy.

    Raises:
        AssertionError: naming the statistic that differs.
    """
    z = (x - x.mean(0)) / x.std(0, ddof=1)
    along = np.linalg.eigvalsh(np.corrcoef(x.T))[::-1]
    constant = np.ones((len(x), 1))
    expected = {
        "mean": x.mean(0),
        "std": x.std(0, ddof=1),
        "min": x.min(0),
        "max": x.max(0),
        "median": np.sort(x, axis=0)[(len(x) - 1) // 2],
        "histogram": np.stack([(z < edge).sum(0) for edge in (*EDGES, np.inf)]),
        "correlation": np.corrcoef(x.T),
        "principal axes": along / along.sum(),
        "regression": np.linalg.lstsq(np.hstack([z, constant]), y, rcond=None)[0],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].value, value, rtol=1e-7, atol=1e-9, err_msg=name)


def show(found: dict[str, Statistic], names: list[str]) -> None:
    """Print what was found: the first columns, then what is said of all."""
    columns = ("mean", "std", "min", "median", "max")
    print(f"{'feature':24}" + "".join(f"{name:>10}" for name in columns))
    for at, feature in enumerate(names[:SHOWN]):
        values = "".join(f"{found[name].value[at]:10.4f}" for name in columns)
        print(f"{feature:24}{values}")
    print(f"... and {len(names) - SHOWN} features more")
    pairs = np.triu(found["correlation"].value, k=1)
    first, second = np.unravel_index(np.abs(pairs).argmax(), pairs.shape)
    print(f"most alike: {names[first]}, {names[second]} ({pairs[first, second]:.4f})")
    shares = found["principal axes"].value
    print(f"variance along the first three principal axes: {shares[:3].sum():.4f}")
    heaviest = np.abs(found["regression"].value[:-1]).argmax()
    print(f"what weighs most in a linear model of the diagnosis: {names[heaviest]}")


def show_communication(found: dict[str, Statistic], nbytes: int) -> None:
    """Print, of each statistic, the bytes that the client got and the workers' collectives."""
    print(f"the data: {nbytes:,} bytes in blocks; what was exchanged, and what the client got:")
    for name, one in found.items():
        sent = ", ".join(f"{c.kind} {c.nbytes:,}" for c in one.collectives) or "nothing"
        print(f"{name:16}{one.fetched:8,}  {sent}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    data = load_breast_cancer()
    rows, labels = data.data, data.target.astype(np.float64)
    found = statistics(torch.from_numpy(rows), torch.from_numpy(labels), args.workers)
    check(found, rows, labels)
    show(found, list(data.feature_names))
    print("all of it agrees with numpy")
    show_communication(found, rows.nbytes + labels.nbytes)


if __name__ == "__main__":
    main()

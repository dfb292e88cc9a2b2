"""Schema of a machine file: units and bounds of its figures, and the required ones.

A change that would misread old files needs a new VERSION.
"""

from __future__ import annotations

from typing import NamedTuple

VERSION = 1
DEVICES = ("cpu", "cuda")
#: Origins of figures.
BASES = ("measured", "datasheet")
#: Dtypes of matmuls, as graphs print them; f8 stands for both of torch's eight-bit floats.
DTYPES = ("f64", "f32", "f16", "bf16", "f8", "i8")
#: Families of elementwise ops, by the work on an element.
FAMILIES = ("add", "exp", "gelu", "norm", "softmax", "reduction")
#: Carriers of collectives: between ranks of a host, between CPUs of a host for small payloads, and
#: between hosts.
CARRIERS = ("local", "sockets", "network")


class Quantity(NamedTuple):
    """Definition of a figure."""

    unit: str  # unit in the file
    least: float  # plausible minimum
    most: float  # plausible maximum
    about: str  # description
    needed: bool = True  # required in every file


_SECONDS = (0.0, 10.0)
_BANDWIDTH = (1e6, 1e15)

FIGURES: dict[str, Quantity] = {
    "memory.capacity": Quantity("B", 1e6, 1e15, "memory that a rank has"),
    "memory.bandwidth": Quantity("B/s", *_BANDWIDTH, "bytes read and written, beyond the cache"),
    "memory.cache": Quantity("B", 1e3, 1e12, "operands and results up to which the cache has them"),
    "memory.cache_bandwidth": Quantity("B/s", *_BANDWIDTH, "bytes read and written, in the cache"),
    "memory.fresh_bandwidth": Quantity(
        "B/s", *_BANDWIDTH, "bytes of memory that is touched for the first time", False
    ),
    "matmul.tile_rows": Quantity("1", 1, 4096, "rows of a result that are computed together"),
    "matmul.tile_columns": Quantity("1", 1, 4096, "columns likewise"),
    "matmul.units": Quantity("1", 1, 1e5, "tiles that are computed at once"),
    "matmul.depth": Quantity(
        "1", 0, 1e5, "steps of the sum that beginning and ending a tile takes as long as", False
    ),
    **{
        f"matmul.peak.{dtype}": Quantity(
            "flop/s", 1e6, 1e18, f"what the hardware could do at most in {dtype}", False
        )
        for dtype in DTYPES
    },
    **{
        f"matmul.rate.{dtype}": Quantity(
            "flop/s", 1e6, 1e18, f"what large products in {dtype} reach", dtype == "f32"
        )
        for dtype in DTYPES
    },
    **{
        f"pointwise.{family}": Quantity(
            "element/s", 1e3, 1e16, f"elements of {family}, where memory is fast enough"
        )
        for family in FAMILIES
    },
    "host.launch": Quantity("s", *_SECONDS, "an op with next to no work"),
    "host.call": Quantity("s", *_SECONDS, "a call of compiled code"),
    "host.record": Quantity("s", *_SECONDS, "recording an op"),
    "host.message": Quantity("s", *_SECONDS, "a run that is sent, and its answer"),
    "collectives.packed": Quantity(
        "B", 0, 1e12, "values up to which travel faster packed with others than alone"
    ),
    "collectives.ranks": Quantity("1", 1, 1e6, "ranks that a host has room for"),
    **{
        f"range.{what}.{end}": Quantity(unit, 1, 1e15, f"the {end} {about}", False)
        for what, unit, about in (
            ("products", "1", "rows, columns or depth of the products that were measured"),
            ("bytes", "B", "that an op read and wrote which was measured"),
            ("payloads", "B", "payload of the collectives that were measured"),
            ("ranks", "1", "ranks that met in them"),
        )
        for end in ("least", "most")
    },
}
#: Quantities with a measured range of sizes; predictions beyond it are reported.
RANGES = ("products", "bytes", "payloads", "ranks")

#: Figures of each entry of ``[[collectives.CARRIER]]``; ``up_to`` in all but the last.
LINK: dict[str, Quantity] = {
    "latency": Quantity("s", *_SECONDS, "a collective with no payload to speak of"),
    "each": Quantity("s", *_SECONDS, "the same, for each rank beyond the second"),
    "bandwidth": Quantity("B/s", *_BANDWIDTH, "bytes that a rank sends while it receives as many"),
    "up_to": Quantity("B", 1, 1e15, "bytes that a rank sends, to which the entry holds", False),
}


def quantity(key: str) -> Quantity:
    """Return the definition of a figure by its key, as in ``collectives.local[0].each``."""
    return FIGURES.get(key) or LINK[key.rpartition(".")[2]]

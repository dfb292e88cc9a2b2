"""Deprecated alias of ``lazygt.integrations.lightning``."""

import warnings

from lazygt.integrations.lightning import LazyGTAccelerator as LazyGTAccelerator
from lazygt.integrations.lightning import LazyGTStrategy as LazyGTStrategy

warnings.warn(
    "lazygt.lightning is deprecated: import lazygt.integrations.lightning",
    DeprecationWarning,
    stacklevel=2,
)

"""Torch's database of operators, whose samples are drawn without a search for a unittest."""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db

__all__ = ["op_db"]

# Each draw of samples looks for the unittest that asks for them in every frame of the stack, which
# took three quarters of a walk over the database; these tests are none, so nothing is found.
common_utils.extract_test_fn = lambda: None

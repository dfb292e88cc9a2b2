"""The torch that the tests run with, for what differs between releases."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

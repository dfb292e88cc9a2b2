"""Test images of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI, 1998).

``digits.gz`` has a row of 65 bytes for each image: 64 pixels between 0 and 16, and the digit.
"""

import gzip
from pathlib import Path

import torch
from torch import Tensor

_IMAGES, _PIXELS = 1_797, 64


def load() -> tuple[Tensor, Tensor]:
    """Return images as float32 [1797, 1, 8, 8] between 0 and 1, and labels as int64 [1797].

    The order is shuffled, and the same in every process.
    """
    rows = gzip.decompress(Path(__file__).with_name("digits.gz").read_bytes())
    table = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(_IMAGES, _PIXELS + 1)
    table = table[torch.randperm(_IMAGES, generator=torch.Generator().manual_seed(0))]
    return table[:, :_PIXELS].float().div(16).view(_IMAGES, 1, 8, 8), table[:, _PIXELS].long()

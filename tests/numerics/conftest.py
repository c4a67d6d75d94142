"""Small tensors: one thread is faster than a pool, most of all beside other work."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

"""How many threads torch uses in all tests: one, or as many as FEDVEIL_TEST_THREADS says."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(int(os.environ.get("FEDVEIL_TEST_THREADS", "1")))

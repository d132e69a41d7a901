"""What all tests share: the number of torch's threads (one, or FEDVEIL_TEST_THREADS), and a process left as it was found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(int(os.environ.get("FEDVEIL_TEST_THREADS", "1")))
STATUS = Path("/proc/self/status")


def umask() -> str:
    """The process's umask, read without changing it; "" where the system does not tell."""
    found = re.search(r"^Umask:\s*(\d+)", STATUS.read_text("ascii", "replace"), re.M) if STATUS.exists() else None
    return found[1] if found else ""


@pytest.fixture(scope="session", autouse=True)
def _umask_stays() -> Iterator[None]:
    """A umask that tests leave behind takes rights away from whatever is made or started later in the same worker."""
    before = umask()
    yield
    assert umask() == before

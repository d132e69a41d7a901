from functools import lru_cache

import pytest

from fedveil.secure_sum import messages


@pytest.fixture(autouse=True)
def remembered_signatures(monkeypatch):
    """Whether a signature is right is a function of its bytes: many nodes in one process ask once."""
    monkeypatch.setattr(messages, "verify", lru_cache(1 << 16)(messages.verify))

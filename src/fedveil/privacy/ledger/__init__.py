"""The ledger: what was released, kept on disk before it leaves, and what each observer can learn from it."""

from fedveil.privacy.ledger.entries import (
    GROUP,
    Budget,
    BudgetExceeded,
    Exceeded,
    Header,
    OwnRow,
    Receipt,
    Row,
    commit,
    group,
)
from fedveil.privacy.ledger.journal import Damaged, Locked
from fedveil.privacy.ledger.ledger import Ledger

__all__ = [
    "GROUP", "Budget", "BudgetExceeded", "Damaged", "Exceeded", "Header", "Ledger", "Locked", "OwnRow",
    "Receipt", "Row", "commit", "group",
]  # fmt: skip

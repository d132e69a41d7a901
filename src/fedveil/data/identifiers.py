"""Columns that say who a row is, known by their names.

Names alone are looked at: they are public, while which columns hold a value of its own in every row is not.
"""

from __future__ import annotations

import re

ROW = {"patient", "person", "subject", "participant", "record", "case", "row", "account", "customer", "member", "user", "client",
       "passport", "insurance", "policy", "security", "phone", "encounter", "admission", "sample", "employee"}  # fmt: skip
KIND = {"type", "kind", "source", "category", "class", "region", "location", "disposition", "department", "ward", "zone", "area",
        "status", "product", "country", "city", "state", "level", "group", "brand", "genre"}  # fmt: skip
ALONE = {"id", "ids", "uuid", "guid", "identifier", "mrn", "ssn", "iban", "email", "phone", "surname", "name", "index", "rowid"}


def is_identifier(name: str) -> bool:
    """Is this the name of a column that says who a row is: patient_id, PatientID, record_no, uuid, e-mail, last name?"""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.replace("-", ""))]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if len(words) == 1 or words == ["unnamed"]:
        joined = re.fullmatch(r"(.+?)(id|no|nr|nbr|number)", last)
        return last in ALONE or name.lower() == "unnamed: 0" or (joined is not None and joined[1] in ROW)
    if last in ("id", "ids", "uuid", "guid", "identifier", "mrn", "ssn", "iban", "email", "surname"):
        return before not in KIND
    if last in ("no", "nr", "nbr", "number"):
        return before in ROW
    return (words[0] == "id" and last in ROW) or (last == "name" and before in {"first", "last", "family", "full", "patient"})


def learnt_from(name: str) -> str:
    """The note of a dataset that has such a column among its features."""
    return f"check: column '{name}' looks like an identifier by its name, and is learnt from; drop it if it is one"

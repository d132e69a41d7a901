"""The ledger is a plain append-only file; read it, verify it, ask it at another delta."""

import fedveil as fv

fv.run("fed-cdp", data="cancer", rounds=2, local_steps=5, out="runs/ledger", report=False)
ledger = fv.Ledger.read("runs/ledger/ledger.jsonl")  # raises if a record was changed
for row in ledger.table(delta=1e-6):
    print(f"{row.observer:15} {row.unit:8} {row.epsilon} {row.verdict}: {row.reason}")
print("participations per client", ledger.participations())

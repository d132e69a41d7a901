"""Train across clients and read what each observer may learn."""

import fedveil as fv

result = fv.run(
    "fed-cdp-sound", data="digits", rounds=5, local_steps=10, sigma=1.0, out="runs/first", report=False
)

print("test accuracy", result.accuracy)
for row in result.ledger:
    print(row["observer"], row["unit"], row["epsilon"], row["verdict"])

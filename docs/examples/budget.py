"""Ask for an epsilon instead of a sigma; every client may have its own."""

import fedveil as fv

one = fv.run(
    "fed-cdp-sound",
    data="cancer",
    clients=4,
    rounds=5,
    local_steps=1,
    batch_size=106,
    sampling="full",
    learning_rate=1.0,
    model="logistic",
    target_epsilon=2.0,
    calibrate=True,
    out="runs/budget",
    report=False,
)
print("accuracy", one.accuracy, "epsilon", one.epsilon("server", "example"))

many = fv.run(
    "udp-fl-gaussian",
    data="cancer",
    clients=4,
    rounds=5,
    local_steps=2,
    client_epsilons=[1.0, 4.0],
    client_mechanisms=["gaussian", "laplace"],
    out="runs/budgets",
    report=False,
)
ledger = fv.open_run("runs/budgets").ledger()
print("left to client 0:", ledger.remaining(0))
print(many.facts["stopped"])

"""Look at every round as it happens, stop, and continue later to the same final weights."""

import fedveil as fv


class Enough(Exception):
    pass


def watch(facts):
    print(facts.round, facts.metrics["test_accuracy"], facts.metrics["epsilon"])
    if facts.round == 2:
        raise Enough


try:
    fv.run(
        "fed-cdp-sound",
        data="cancer",
        rounds=4,
        local_steps=5,
        checkpoint_every=1,
        out="runs/cut",
        on_round=watch,
        report=False,
    )
except Enough:
    print("stopped after two rounds")
result = fv.resume("runs/cut")
print("finished", result.facts["rounds"], "rounds; epsilon", result.epsilon("server", "example"))

"""A sum that nobody sees in parts: eight nodes, one of which drops out after its shares."""

import numpy as np

from fedveil.secure_sum import noise, simulate
from fedveil.secure_sum.parameters import Parameters, check

# One example moves a node's sum by at most 1; the sum carries noise of deviation 4 whoever of the eight survives, as
# long as six do and at most one colludes with the server.
p = Parameters(
    model=bytes(32), size=1000, grid=2.0**-14, bound=1.0, deviation=4.0, nodes=8, threshold=6, colluders=1
)
check(p)

values = np.random.default_rng(0).normal(size=(8, p.size))
vectors = {
    node: noise.on_grid(p, values[node - 1]) + noise.share(p, key=bytes([node] * 16)) for node in range(1, 9)
}
played = simulate.sum_of(vectors, p, seed=1, drops={3: 2})

result = played.result
assert isinstance(result, simulate.Sum) and 3 not in result.survivors
exact = sum(values[node - 1] for node in result.survivors)
print("survivors:", result.survivors)
print(f"noise in the sum: {np.std(result.total * p.grid - exact):.2f}")
for claim in noise.claims(p):
    assert claim.event is not None
    print(f"{claim.observer}: {claim.verdict}, multiplier {claim.event.noise.multiplier:.3f}; {claim.reason}")

"""A ClientApp whose noise follows from the run's seed, so that a federation can be compared with the simulator.

It lives with the tests: the shipped app has no way to do this, and nodes refuse it unless their policy allows it.
"""

from fedveil.flower import client_app

app = client_app(root_of=lambda config, client: config.seed)

"""A trainer whose noise follows from the run's seed, to compare a federation with the simulator.

It lives with the tests: the shipped trainer has no way to do this, and nodes refuse it unless their policy allows it.
"""

import sys

from fedveil.cli.flower import parse_node_config
from fedveil.flower.owner import owner_of
from fedveil.flower.trainer import serve

if __name__ == "__main__":
    serve(sys.argv[1], owner_of(parse_node_config(sys.argv[3])), root_of=lambda config, client: config.seed)

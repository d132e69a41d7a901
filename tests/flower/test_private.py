"""`fedveil.flower.Private` and `private_mod` around a user's own apps: the noise, clip, ledger and stop that are promised."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the flower extra is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from fedveil.errors import UserError
from fedveil.federation.practice import compared
from fedveil.flower.grid import LocalGrid
from fedveil.flower.private import Private, agreed, playable, private_mod
from fedveil.privacy.ledger import Ledger
from fedveil.protect.noised import Noised

CLIENTS, SIZE = 4, 3000
SERVER = {"recipe": "dp-fedavg", "clip_bound": 0.5, "sigma": 2.0, "cohort": "all"}
CLIENT = {"recipe": "fed-sdp-client", "clip_kind": "flat", "clip_bound": 0.5, "sigma": 2.0, "cohort": "all"}


def weights(value=0.0):
    return {"layer.weight": np.full((SIZE // 10, 10), value, np.float32), "layer.seen": np.array(0, np.int64)}


def record(arrays):
    from flwr.app import Array

    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def client(move=lambda part: 0.0, mods=None, recipe=SERVER, folder="nodes"):
    """Training that adds `move(part)` to every weight, and tells more than it should."""
    app = ClientApp(mods=[private_mod(**recipe, ledger=folder)] if mods is None else mods)

    @app.train()
    def train(message, context):
        before = message.content["arrays"]["layer.weight"].numpy()
        made = {"layer.weight": before + np.float32(move(context.node_config["partition-id"])), "layer.seen": np.array(7)}
        metrics = MetricRecord({"num-examples": 10.0, "loss": 0.123})
        return Message(RecordDict({"arrays": record(made), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1.0, "secret": 1.0})}), reply_to=message)

    return app


def grid_of(app, clients=CLIENTS, tamper=None):
    return LocalGrid(app, {100 + k: {"partition-id": k} for k in range(clients)}, tamper)


def strategy(tmp_path, inner=None, name="run", recipe=SERVER, **more):
    plain = inner or FedAvg(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=1, min_train_nodes=1)
    # The cohort's rule is a key of the recipe; how many are drawn is a keyword of the strategy.
    keys = {key: value for key, value in recipe.items() if key not in ("recipe", "cohort")}
    from fedveil.protect.catalogue import get
    from fedveil.protect.recipe import with_changes

    known = with_changes(get(recipe["recipe"]), {"cohort": recipe["cohort"]})
    return Private(plain, known, clients=CLIENTS, out=tmp_path / name, **{**keys, **more})


def nominal(book):
    """What a node has spent so far with its server."""
    (row,) = [r for r in book.table() if (r.observer, r.unit, r.verdict) == ("server", "client", "nominal")]
    return row.epsilon


def moved(result):
    return result.arrays["layer.weight"].numpy().reshape(-1).astype(np.float64)


@pytest.mark.parametrize("factor", [1.0, 0.9, 0.0])
def test_noise_at_the_server_is_the_noise_that_is_claimed(factor, tmp_path, monkeypatch):
    """Each case fails a right wrapper with probability below 1e-6; a scale that is a tenth too small is found."""
    real = Noised.add
    monkeypatch.setattr(Noised, "add", lambda s, total, key, step=0, times=1.0: real(s, total, key, step, times * factor))
    drawn = []
    for k in range(4):
        private = strategy(tmp_path, name=f"run{k}")
        result = private.start(grid_of(client()), record(weights()), num_rounds=1)
        drawn.append(moved(result) * CLIENTS)  # nobody moves: what is left is noise, over the cohort
    found = compared(0.5 * 2.0, np.concatenate(drawn))
    assert found.verdict == ("holds" if factor == 1 else "too little noise"), found


def test_noise_on_the_client_is_the_noise_that_is_claimed(tmp_path):
    replies = []

    def keep(node, message, reply):
        replies.append(reply.content["arrays"]["layer.weight"].numpy().reshape(-1).astype(np.float64))
        return [reply]

    private = strategy(tmp_path, recipe=CLIENT)
    private.start(grid_of(client(recipe=CLIENT, folder=tmp_path / "nodes"), tamper=keep), record(weights()), num_rounds=2)
    assert len(replies) == 2 * CLIENTS
    assert compared(0.5 * 2.0, np.concatenate(replies))
    node = Ledger.read(tmp_path / "nodes" / "node-0" / "ledger.jsonl")
    assert node.rounds == 2
    assert nominal(node) == pytest.approx(private.epsilon("server"), rel=1e-6)


def test_nothing_but_the_update_leaves_a_client_and_a_loud_one_is_clipped_twice(tmp_path):
    seen = []

    def swell(node, message, reply):
        """A client that lies about its clip."""
        assert set(reply.content) == {"arrays", "fedveil"} and set(reply.content["arrays"]) == {"layer.weight"}
        assert np.linalg.norm(reply.content["arrays"]["layer.weight"].numpy()) <= 0.5
        seen.append(node)
        if node == 100:
            reply.content["arrays"] = record({"layer.weight": np.full((SIZE // 10, 10), 1e6, np.float32)})
        return [reply]

    quiet = {**SERVER, "sigma": 1e-3}
    private = strategy(tmp_path, recipe=quiet)
    result = private.start(grid_of(client(lambda part: 1e3, recipe=quiet), tamper=swell), record(weights()), num_rounds=1)
    assert len(seen) == CLIENTS
    assert np.linalg.norm(moved(result)) == pytest.approx(0.5, rel=0.05)  # the mean of four updates of norm 0.5
    assert result.arrays["layer.seen"].numpy() == 0  # counters of private training stay where they are
    assert not result.train_metrics_clientapp and not result.evaluate_metrics_clientapp


def test_the_wrapped_strategy_takes_its_own_step_on_the_noised_mean(tmp_path):
    adam = FedAdam(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1, eta=0.1)
    quiet = {**SERVER, "sigma": 1e-3}
    result = strategy(tmp_path, adam, recipe=quiet).start(
        grid_of(client(lambda part: 1.0, recipe=quiet)), record(weights()), num_rounds=1
    )
    assert 0 < np.abs(moved(result)).max() <= 1.0 and not np.allclose(moved(result), 0.5 / np.sqrt(SIZE))


def test_a_client_without_the_mod_or_with_another_recipe_is_left_out(tmp_path, capfd):
    other = {**CLIENT, "sigma": 0.01}
    for name, app in {"plain": client(mods=[], recipe=CLIENT), "other": client(recipe=other, folder=tmp_path)}.items():
        result = strategy(tmp_path, name=name, recipe=CLIENT).start(grid_of(app), record(weights()), num_rounds=1)
        assert result.arrays is None or not len(result.arrays)


def test_training_that_fails_sends_an_empty_update_and_evaluation_is_refused(tmp_path):
    def fail(part):
        if part == 2:
            raise RuntimeError("secret of my data")
        return 1.0

    replies = []
    app = client(fail, recipe=SERVER)
    grid = grid_of(app, tamper=lambda node, message, reply: replies.append(reply) or [reply])
    strategy(tmp_path).start(grid, record(weights()), num_rounds=1)
    norms = sorted(float(np.linalg.norm(r.content["arrays"]["layer.weight"].numpy())) for r in replies)
    assert norms[0] == 0 and norms[1] > 0.49
    ask = Message(RecordDict({"config": ConfigRecord({})}), 100, "evaluate")
    (answer,) = grid.send_and_receive([ask])
    assert answer.has_error() and "private rows" in answer.error.reason


def test_the_run_stops_at_its_budget_and_continues_only_with_its_ledger(tmp_path):
    one = strategy(tmp_path, epsilon=1e9).start(grid_of(client()), record(weights()), num_rounds=1)
    assert one.arrays is not None
    spent = {"sigma": 2.0, "epsilon": 2.0, "recipe": CLIENT}
    private = strategy(tmp_path, name="clients", **spent)
    grid = grid_of(client(recipe=CLIENT, folder=tmp_path / "nodes"))
    private.start(grid, record(weights()), num_rounds=5)
    assert "budget is spent" in private.stopped
    played = Ledger.read(tmp_path / "clients" / "ledger.jsonl").rounds
    assert played < 5 and private.epsilon() <= 2.0 and len(grid.sent) == played * CLIENTS
    with pytest.raises(UserError, match="resume=True"):
        strategy(tmp_path, name="clients", **spent).start(grid, record(weights()), num_rounds=5)
    again = strategy(tmp_path, name="clients", resume=True, **spent)
    again.start(grid, record(weights()), num_rounds=5)
    assert again.stopped and Ledger.read(tmp_path / "clients" / "ledger.jsonl").rounds == played


def test_an_owner_who_has_spent_enough_is_asked_in_vain(tmp_path):
    recipe = {**CLIENT, "epsilon": 2.0}
    app = client(recipe=recipe, folder=tmp_path / "nodes")
    errors = []
    grid = grid_of(app, tamper=lambda n, m, r: errors.append(r.has_error()) or [r])
    strategy(tmp_path, recipe=CLIENT).start(grid, record(weights()), num_rounds=4)
    assert not errors[0] and errors[-1]
    assert Ledger.read(tmp_path / "nodes" / "node-1" / "ledger.jsonl").spent(0, "server", "client") <= 2.0


def test_poisson_cohorts_pay_for_every_round_also_an_empty_one(tmp_path):
    recipe = {**SERVER, "cohort": "poisson"}
    private = strategy(tmp_path, recipe=recipe, cohort=0.5, seed=1)
    grid = grid_of(client(recipe=recipe))
    private.start(grid, record(weights()), num_rounds=6)
    everybody = strategy(tmp_path, name="all")
    everybody.start(grid_of(client()), record(weights()), num_rounds=6)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").rounds == 6 and len(grid.sent) < 6 * CLIENTS
    assert 0 < private.epsilon("public") < everybody.epsilon("public")


@pytest.mark.parametrize("name", ["fed-cdp-sound", "sum-cdp", "non-private", "nbafl", "ldp-fl", "random-noise"])
def test_recipes_that_need_more_than_a_finished_update_are_refused(name, tmp_path):
    with pytest.raises(UserError, match="cannot be played around your own apps"):
        private_mod(name)
    with pytest.raises(UserError, match="cannot be played around your own apps"):
        Private(FedAvg(), name, clients=3, out=tmp_path)


def test_more_nodes_than_clients_end_the_run(tmp_path):
    with pytest.raises(UserError, match="the promise counts"):
        strategy(tmp_path).start(grid_of(client(), clients=CLIENTS + 1), record(weights()), num_rounds=1)


FALLING = {**CLIENT, "sigma": "linear:8:2"}


def asked_for(grid, recipe, number, rounds):
    """The answer of node 100 when the server names this round."""
    known = {key: value for key, value in recipe.items() if key != "recipe"}
    order = ConfigRecord({"recipe": agreed(playable(recipe["recipe"], known)), "round": number, "rounds": rounds})
    message = Message(RecordDict({"arrays": record(weights()), "fedveil": order}), 100, "train")
    (answer,) = grid.send_and_receive([message])
    return answer


def test_with_a_falling_sigma_the_node_plays_rounds_in_their_order_and_no_other(tmp_path):
    """A server that picks among a schedule's sigmas after seeing uploads would compose what is charged as fixed in advance."""
    grid = grid_of(client(recipe=FALLING, folder=tmp_path))
    assert not asked_for(grid, FALLING, 1, 4).has_error()
    for number, rounds in ((4, 4), (1, 4), (3, 4), (2, 2), (2, 9)):  # skipped, repeated, or another plan's sigma
        assert "its own order" in asked_for(grid, FALLING, number, rounds).error.reason, (number, rounds)
    assert not asked_for(grid, FALLING, 2, 4).has_error()
    assert Ledger.read(tmp_path / "node-0" / "ledger.jsonl").rounds == 2


def test_with_one_sigma_any_round_may_be_named(tmp_path):
    grid = grid_of(client(recipe=CLIENT, folder=tmp_path))
    for number, rounds in ((3, 4), (3, 4), (1, 2)):
        assert not asked_for(grid, CLIENT, number, rounds).has_error()


def test_a_falling_sigma_is_played_by_server_and_nodes_alike(tmp_path):
    private = strategy(tmp_path, recipe=FALLING)
    private.start(grid_of(client(recipe=FALLING, folder=tmp_path / "nodes")), record(weights()), num_rounds=3)
    node = Ledger.read(tmp_path / "nodes" / "node-0" / "ledger.jsonl")
    assert node.rounds == 3 and nominal(node) == pytest.approx(private.epsilon("server"), rel=1e-6)


@pytest.mark.parametrize("epsilon", [None, 9.0])
def test_a_server_that_stops_when_it_likes_leaves_a_node_its_budget_or_no_promise(epsilon, tmp_path):
    """How many rounds there were is then an output: what was spent at such an end is no guarantee."""
    recipe = CLIENT if epsilon is None else {**CLIENT, "epsilon": epsilon}
    grid = grid_of(client(recipe=recipe, folder=tmp_path))
    assert not asked_for(grid, CLIENT, 1, 100).has_error()
    node = Ledger.read(tmp_path / "node-0" / "ledger.jsonl")
    for observer in ("server", "participants", "public"):
        assert node.epsilon(observer, "client") == epsilon
    assert node.spent(0, "server", "client") is None if epsilon is None else 0 < node.spent(0, "server", "client") < 4


def test_a_node_without_a_number_of_its_own_keeps_one_ledger_whatever_id_the_superlink_gives_it(tmp_path):
    app = ClientApp(mods=[private_mod(**CLIENT, ledger=tmp_path)])
    app.train()(lambda message, context: Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message))
    for node in (100, 2**60 + 7):
        known = playable(CLIENT["recipe"], {key: value for key, value in CLIENT.items() if key != "recipe"})
        order = ConfigRecord({"recipe": agreed(known), "round": 1, "rounds": 1})
        message = Message(RecordDict({"arrays": record(weights()), "fedveil": order}), node, "train")
        (answer,) = LocalGrid(app, {node: {}}).send_and_receive([message])
        assert not answer.has_error()
    assert Ledger.read(tmp_path / "node" / "ledger.jsonl").rounds == 2


def test_noised_uploads_are_charged_before_anybody_is_asked(tmp_path):
    """The SuperLink keeps what arrived: a server that dies before it merges has shown it all the same."""
    charged = []

    def look(node, message, reply):
        charged.append(Ledger.read(tmp_path / "run" / "ledger.jsonl").rounds)
        return [reply]

    private = strategy(tmp_path, recipe=CLIENT)
    private.start(grid_of(client(recipe=CLIENT, folder=tmp_path / "nodes"), tamper=look), record(weights()), num_rounds=2)
    assert charged == [1] * CLIENTS + [2] * CLIENTS


def test_a_continued_run_plays_the_rounds_it_began_with_and_no_more_and_nodes_keep_their_numbers(tmp_path):
    def halfway(node, message, reply):
        if reply.content["fedveil"]["round"] == 2:
            raise KeyboardInterrupt
        return [reply]

    app = client(recipe=CLIENT, folder=tmp_path / "nodes")
    with pytest.raises(KeyboardInterrupt):
        strategy(tmp_path, recipe=CLIENT).start(grid_of(app, tamper=halfway), record(weights()), num_rounds=4)
    with pytest.raises(UserError, match="config differs"):
        strategy(tmp_path, recipe={**CLIENT, "sigma": 1.0}, resume=True).start(grid_of(app), record(weights()), num_rounds=4)
    again = strategy(tmp_path, recipe=CLIENT, resume=True)
    back = LocalGrid(app, {node: {"partition-id": node - 100} for node in (103, 100)})  # others are away
    again.start(back, record(weights()), num_rounds=10)
    book = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert "that the run began with" in again.stopped and book.rounds == 4
    assert book.participations().tolist() == [4] * CLIENTS
    assert again._roster == {100 + k: k for k in range(CLIENTS)}

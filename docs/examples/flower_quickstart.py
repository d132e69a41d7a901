"""Flower's PyTorch quickstart, private in five changed lines (marked). Run it in one process, or its two apps with `flwr run`."""

import torch

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
except ModuleNotFoundError:
    raise SystemExit(print("skipped: this example needs Flower: pip install '.[flower]' in fedveil's folder")) from None

import fedveil as fv
from fedveil.flower import Private, private_mod  # 1

CLIENTS = 10
RECIPE = {"recipe": "dp-fedavg", "clip_bound": 0.5}  # 2: the same on both sides
DATA = fv.load("digits")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)


client_app = ClientApp(mods=[private_mod(**RECIPE)])  # 3: was ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part = int(context.node_config["partition-id"])
    x, y = torch.tensor(DATA.x[part::CLIENTS]), torch.tensor(DATA.y[part::CLIENTS])
    optimizer = torch.optim.SGD(net.parameters(), lr=float(message.content["config"]["lr"]))
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


server_app = ServerApp()


def accuracy(number: int, arrays: ArrayRecord) -> MetricRecord:
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    right = net(torch.tensor(DATA.x_test)).argmax(1) == torch.tensor(DATA.y_test)
    return MetricRecord({"accuracy": right.float().mean().item()})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_train=1.0, min_available_nodes=CLIENTS)
    strategy = Private(strategy, clients=CLIENTS, epsilon=8.0, out="runs/flower-quickstart", **RECIPE)  # 4
    result = strategy.start(
        grid, ArrayRecord(Net().state_dict()), num_rounds=8, train_config=ConfigRecord({"lr": 0.5}), evaluate_fn=accuracy
    )
    print("accuracy", result.evaluate_metrics_serverapp[8]["accuracy"])
    print("epsilon, per client, for whoever gets the model:", strategy.epsilon("public"))  # 5


if __name__ == "__main__":  # without SuperLink and SuperNodes
    from fedveil.flower.grid import LocalGrid

    torch.manual_seed(0)
    main(LocalGrid(client_app, {100 + k: {"partition-id": k} for k in range(CLIENTS)}), None)

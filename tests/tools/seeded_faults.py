"""Does the suite notice when the privacy code is wrong? Faults are sown one by one into a copy, and tests must fail.

    python tests/tools/seeded_faults.py --state faults.json [--only NAME …]
    python tests/tools/seeded_faults.py --tree OLD --table-of before --state before.json    # the tree before the rebuild
    python tests/tools/seeded_faults.py --page docs/faults.md --state faults.json --state before.json

A fault is a replacement in one source file that must match exactly once. The tests named beside it are run in a copy of the
tree with the fault: one must fail, and pass again without it. The state file keeps what is done, so a stopped command goes on.
Compiled code is that of the installed package and is not changed. `--part 0/3` runs every third fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
# Imported once: children inherit them.
SHARED = (
    "torch", "torch.func", "scipy.stats", "scipy.sparse", "scipy.special", "scipy.optimize", "sklearn.datasets",
    "dp_accounting.rdp", "dp_accounting.pld.privacy_loss_distribution", "pydantic", "safetensors.numpy", "typer.testing",
    "hypothesis", "pytest",
    "cryptography.hazmat.primitives.asymmetric.ed25519", "matplotlib", "pandas", "flwr.app", "flwr.clientapp", "flwr.serverapp",
)  # fmt: skip
# The copy's Python files with the installed compiled ones: an editable install would otherwise import the original.
BEGIN = """
import pathlib, sys
places = [pathlib.Path(folder) / "fedveil" for folder in sys.path]
compiled = next((str(place) for place in places if list(place.glob("*.so"))), None)  # of this Python, before any it builds on
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower() + type(f).__name__.lower()]
for name in [n for n in sys.modules if n.partition(".")[0] == "fedveil"]:
    del sys.modules[name]
sys.path.insert(0, "src")
import fedveil
assert pathlib.Path(fedveil.__file__).resolve().is_relative_to(pathlib.Path("src").resolve()), fedveil.__file__
fedveil.__path__ += [compiled] if compiled else []
import hypothesis, pytest
hypothesis.settings.register_profile("loaded", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("loaded")
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Fault:
    """name; what is replaced in src/fedveil/file; the tests that should notice, fastest first."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


NOISE = (
    "tests/protect/test_noised.py", "tests/protect/test_engines_add_the_noise.py",
    "tests/protect/test_practice_equals_promise.py",
)  # fmt: skip
PROMISE = ("tests/protect/test_promise.py", "tests/protect/test_practice_equals_promise.py")
LEDGER = ("tests/privacy/ledger/test_ledger.py",)

NOW = (
    Fault("noise 2 % too small", "protect/noised.py", "return Drawing(self.law, self.scale, self.shape",
          "return Drawing(self.law, self.scale * 0.98, self.shape", NOISE),
    Fault("noise 2 % too large", "protect/noised.py", "return Drawing(self.law, self.scale, self.shape",
          "return Drawing(self.law, self.scale * 1.02, self.shape", NOISE),
    Fault("sigma 2 % too small in noise and claim", "protect/place.py", "scale=scale * recipe.noise_on.factor(count),",
          "scale=scale * recipe.noise_on.factor(count) * 0.98,", (*PROMISE, *NOISE)),
    Fault("root of layers dropped", "protect/clip.py", "return bound * (layers if self.order == 1 else math.sqrt(layers))",
          "return bound", PROMISE),
    Fault("clip of updates skipped", "protect/bounded.py", "        by = factor(size, bound)\n", "        by = 1.0\n",
          ("tests/training/test_contributions.py", "tests/federation/test_round.py")),
    Fault("clip factor 2 % too large", "protect/bounded.py", "return 1.0 if norm <= limit else limit / norm",
          "return 1.0 if norm <= limit else 1.02 * limit / norm",
          ("tests/training/test_contributions.py", "tests/federation/test_round.py")),
    Fault("one step fewer in the event", "protect/place.py", "out.append(stated(observer, replace(value, steps=times), why))",
          "out.append(stated(observer, replace(value, steps=max(1, times - 1)), why))", PROMISE),
    Fault("steps of equal noise merged into one", "protect/noised.py", "found.setdefault(value, []).append(step)",
          "found[value] = [step]", PROMISE),
    Fault("wrong q of batches", "protect/sampling.py", 'else Sampling("poisson", rate=batch / size), "zero-out")',
          'else Sampling("poisson", rate=batch / (size + 1)), "zero-out")', (*PROMISE, "tests/protect/test_batches.py")),
    Fault("wrong rate of the cohort", "protect/sampling.py", "rate = min(1.0, expected / clients)",
          "rate = min(1.0, expected / (clients + 1))", PROMISE),
    Fault("sensitivity halved for fixed batches", "protect/sampling.py",
          'drawn = Sampling("fixed", rate=batch / size, batch=int(batch), population=size)\n'
          '        return Counted(drawn, "replace-one", 2.0)',
          'drawn = Sampling("fixed", rate=batch / size, batch=int(batch), population=size)\n'
          '        return Counted(drawn, "replace-one", 1.0)', PROMISE),
    Fault("sensitivity halved for one example of an update", "protect/place.py",
          'noised.bound if noised.relation == "replace-one" else 2 * noised.bound', "noised.bound", PROMISE),
    Fault("the noised count beside the sum is not counted", "protect/place.py",
          "beside=recipe.clip.rule.beside() / drawn.reach,", "beside=0.0,", PROMISE),
    Fault("rounding to the grid is not counted", "protect/law.py",
          "z = noise.snapped_multiplier(scale, bound, grid, dimension)", "z = scale / bound",
          ("tests/protect/test_noised.py", "tests/protect/test_exact.py", "tests/protect/test_promise.py")),
    Fault("the samplers' error is not counted", "protect/law.py",
          "return replace(named, ratio=count * error.ratio, tail=count * error.tail)", "return named",
          ("tests/protect/test_noised.py", "tests/protect/test_exact.py", "tests/protect/test_promise.py")),
    Fault("rounding of sums is not in the bound", "protect/place.py", "(1 + slack if exact else 1.0)", "1.0",
          ("tests/protect/test_promise.py", "tests/protect/test_noised.py", "tests/training/test_contributions.py")),
    Fault("every step gets the noise of the first", "protect/noised.py",
          "self.law.units(key, step, np.size(total)", "self.law.units(key, 0, np.size(total)",
          ("tests/protect/test_noised.py", "tests/protect/test_engines_add_the_noise.py", "tests/protect/test_exact.py")),
    Fault("noise is drawn twice", "protect/noised.py",
          "            units = units + self.law.units(key, step, np.size(total), scale / self.grid, self.shape, self.norm)\n",
          "            draw = lambda at: self.law.units(key, at, np.size(total), scale / self.grid, self.shape, self.norm)\n"
          "            units = units + draw(step) + draw(step + 99)\n",
          NOISE),
    Fault("one engine's noise is 2 % too small", "training/native.py", "np.array([one.scale for one in units]",
          "np.array([0.98 * one.scale for one in units]", ("tests/protect/test_engines_add_the_noise.py",)),
    Fault("the torch engines skip noise in the last step", "training/torch/descent.py",
          "if noises is not None:\n            times",
          "if noises is not None and step + 1 < plan.steps:\n            times",
          ("tests/protect/test_engines_add_the_noise.py", "tests/training/torch/test_stacked.py")),
    Fault("Laplace noise 2 % too small", "protect/law.py", "return exact.laplace(key, step, count, scale)",
          "return exact.laplace(key, step, count, 0.98 * scale)", NOISE),
    Fault("a client's own delta is ignored", "privacy/ledger/ledger.py",
          "delta = self.header.delta if budget.delta is None else budget.delta", "delta = self.header.delta", LEDGER),
    Fault("budgets are left alone by the coming release", "privacy/ledger/ledger.py",
          "together = replace(together, book=self._book.plus(release))", "pass", LEDGER),
    Fault("budgets may be exceeded by 2 %", "privacy/ledger/ledger.py", "reached * ROUNDING > budget.epsilon",
          "reached > 1.02 * budget.epsilon", LEDGER),
    Fault("a claim about everyone counts once for all rounds", "privacy/ledger/balance.py",
          "        self.everyone.update(shared)\n\n",
          "        self.everyone.update(shared - set(self.everyone))\n\n", LEDGER),
    Fault("a replay is free though other bits were made", "privacy/ledger/ledger.py",
          "this = _Past(fingerprint, _content(body), made)", "this = self._past.get(replay_of or \"\") or _Past(fingerprint, "
          "_content(body), made)", LEDGER),
    Fault("a round is charged after it is shown", "federation/loop.py",
          "            charge(ledger, release_of(prepared, now, clients), mark, made)\n            lost",
          "            later = (release_of(prepared, now, clients), mark, made)\n"
          "            turn.__dict__.setdefault('owed', []).append(later)\n"
          "            for owed in turn.__dict__['owed'][:-1]:\n"
          "                charge(ledger, *owed)\n"
          "            del turn.__dict__['owed'][:-1]\n            lost",
          ("tests/federation/test_loop.py::test_a_round_is_in_the_ledger_on_disk_before_anybody_hears_of_it",)),
    Fault("a node trains before it charges", "flower/node.py",
          "    _charge(coming, request, contract, owner, submitter, root_of)\n    # From here on nothing may raise.\n"
          "    upload = _upload(prepared, state, now, request, contract, owner, cache)\n",
          "    upload = _upload(prepared, state, now, request, contract, owner, cache)\n"
          "    _charge(coming, request, contract, owner, submitter, root_of)\n",
          ("tests/flower/test_contract.py", "tests/flower/test_flower.py")),
    Fault("participants' own coins are forgotten", "protect/place.py",
          'known = setting.colluders if observer == "participants" else 0', "known = 0", PROMISE),
    Fault("preparation from private rows is not charged", "protect/promise.py",
          "    if not notes:\n        return None\n    reason", "    if notes is not None:\n        return None\n    reason",
          ("tests/protect/test_promise.py", "tests/federation/test_loop.py")),
    Fault("wrong order in the moments' bound", "privacy/renyi.py", "found: np.ndarray = result / (wanted - 1)",
          "found: np.ndarray = result / wanted", ("tests/privacy/test_accountants.py", "tests/privacy/test_golden.py")),
    Fault("shares of noise for one node too many", "secure_sum/noise.py",
          "return parameters.deviation / math.sqrt(parameters.honest)",
          "return parameters.deviation / math.sqrt(parameters.honest + 1)",
          ("tests/secure_sum/test_pieces.py", "tests/federation/test_sums.py")),
)  # fmt: skip

OLD_PROMISE = ("tests/learning/test_promise.py", "tests/learning/test_practice_keeps_promise.py")
OLD_LEDGER = ("tests/privacy/test_ledger.py",)
BEFORE = (
    Fault("noise 2 % too small", "learning/noise.py", "return normals(key, step, count) * _F(multiplier * factor)",
          "return normals(key, step, count) * _F(0.98 * multiplier * factor)", ("tests/learning/test_noise.py",)),
    Fault("noise 2 % too large", "learning/noise.py", "return normals(key, step, count) * _F(multiplier * factor)",
          "return normals(key, step, count) * _F(1.02 * multiplier * factor)", ("tests/learning/test_noise.py",)),
    Fault("sigma 2 % too small in the claim", "learning/promise.py",
          'scale = sigma * (1.0 if recipe.clip.rule == "adaclip" else bound)',
          'scale = 0.98 * sigma * (1.0 if recipe.clip.rule == "adaclip" else bound)', OLD_PROMISE),
    Fault("root of layers dropped", "learning/promise.py",
          'return bound * (layers if recipe.clip.norm == "l1" else math.sqrt(layers))', "return bound", OLD_PROMISE),
    Fault("clip of updates skipped", "learning/round.py", "        if norm > limit:\n            # One",
          "        if False:\n            # One",
          ("tests/learning/test_round.py",)),
    Fault("clip factor 2 % too large", "learning/round.py", "np.float32(limit / norm * (1 - 2**-22))",
          "np.float32(limit / norm * 1.02)", ("tests/learning/test_round.py",)),
    Fault("steps of equal noise merged into one", "learning/promise.py", "counts[value] = counts.get(value, 0) + 1",
          "counts[value] = 1", OLD_PROMISE),
    Fault("wrong q of batches", "learning/promise.py", 'return Sampling("poisson", rate=batch / size), "zero-out", 1.0, steps',
          'return Sampling("poisson", rate=batch / (size + 1)), "zero-out", 1.0, steps', OLD_PROMISE),
    Fault("sensitivity halved for fixed batches", "learning/promise.py",
          '"replace-one",\n            2.0,\n            steps,', '"replace-one",\n            1.0,\n            steps,',
          OLD_PROMISE),
    Fault("the noised count beside the sum is not counted", "learning/promise.py",
          "z = (z**-2 + (2 * recipe.clip.count_noise) ** -2) ** -0.5", "pass", OLD_PROMISE),
    Fault("rounding to the grid is not counted", "learning/promise.py",
          "return snapped_multiplier(scale, joint, recipe.grid * bound, setting.dimension)", "return scale / joint", OLD_PROMISE),
    Fault("every step gets the noise of the first", "learning/noise.py",
          "return normals(key, step, count) * _F(multiplier * factor)",
          "return normals(key, 0, count) * _F(multiplier * factor)", ("tests/learning/test_noise.py",)),
    Fault("one engine's noise is 2 % too small", "learning/descent.py",
          "np.broadcast_to(self.plan.multipliers[step] * on", "np.broadcast_to(0.98 * self.plan.multipliers[step] * on",
          ("tests/learning/test_stacked.py",)),
    Fault("a client's own delta is ignored", "privacy/ledger.py",
          "delta = self.header.delta if budget.delta is None else budget.delta", "delta = self.header.delta", OLD_LEDGER),
    Fault("budgets are left alone by the coming release", "privacy/ledger.py",
          "together = replace(together, book=self._book.plus(release))", "pass", OLD_LEDGER),
    Fault("budgets may be exceeded by 2 %", "privacy/ledger.py", "reached * ROUNDING > budget.epsilon",
          "reached > 1.02 * budget.epsilon", OLD_LEDGER),
    Fault("wrong order in the moments' bound", "privacy/renyi.py", "    return result / (wanted - 1)",
          "    return result / wanted", ("tests/privacy/test_accountants.py", "tests/privacy/test_golden.py")),
)  # fmt: skip


def copy_of(tree: Path, to: Path) -> None:
    away = shutil.ignore_patterns(".git", "__pycache__", ".venv", "site", "build", "_skbuild", "node_modules", "*.so")
    shutil.copytree(tree, to, ignore=away, dirs_exist_ok=True)


def run(copy: Path, test: str, seconds: int) -> str:
    """"" if the tests pass, else the first that fails. In a child of this process, which has what tests import but fedveil."""
    log = copy.parent / "log.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        with open(log, "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.argv = ["pytest", test, "-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
        code = 3
        try:
            exec(compile(BEGIN, "begin", "exec"), {"__name__": "begin"})
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.2)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "timeout"
    if code == 0:
        return ""
    said = log.read_text("utf-8", "replace")
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    return found[0] if found else f"exit {code}: {said[-300:]}"


def sow(copy: Path, fault: Fault) -> str:
    """Put the fault into the copy; returns the file's text as it was."""
    path = copy / "src" / "fedveil" / fault.file
    text = path.read_text("utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: the text to replace occurs {text.count(fault.old)} times in {fault.file}")
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    return text


def judge(copy: Path, fault: Fault, seconds: int) -> dict[str, object]:
    """Whether the fault is caught: by a test that fails with it and passes without it."""
    unclear = []
    for test in fault.tests:
        before = sow(copy, fault)
        try:
            failed = run(copy, test, seconds)
        finally:
            (copy / "src" / "fedveil" / fault.file).write_text(before, "utf-8")
        if not failed:
            continue
        wrong = "" if "::" in failed else "no test failed by itself"
        wrong = wrong or run(copy, failed, seconds)
        if not wrong:
            return {"caught": True, "by": failed}
        unclear.append(f"{failed} ({wrong})")
    return {"caught": False, "tests": list(fault.tests), "unclear": unclear}


def table(faults: tuple[Fault, ...], state: dict[str, dict[str, object]]) -> str:
    lines = ["| fault | file | caught by |", "|---|---|---|"]
    for fault in faults:
        found = state.get(fault.name)
        said = "not run" if found is None else f"`{found['by']}`" if found["caught"] else "**not caught**"
        lines.append(f"| {fault.name} | `{fault.file}` | {said} |")
    return "\n".join(lines)


def page(states: list[Path]) -> str:
    """The last results of both tables, for people. Either table may lie in several files (`--part`)."""
    kept: dict[str, dict[str, dict[str, object]]] = {"now": {}, "before": {}}
    for path in states:
        whole = json.loads(path.read_text())
        kept[whole["of"]].update(whole["faults"])
    lines = [
        "# Sown faults", "",
        "Faults are put into a copy of the code one by one; the suite must notice: a test fails with it and passes without.",
        "`tests/tools/seeded_faults.py` holds the faults and runs them (minutes; it goes on where it was stopped).",
        "The first run missed four: the rate of a cohort of coins, the samplers' error, rounding of sums, and one",
        "step's noise used in all steps. They have tests since.", "",
    ]  # fmt: skip
    for of, title, faults in (("now", "Today", NOW), ("before", "The tree before the code was rebuilt from parts (0.1)", BEFORE)):
        done = [kept[of][f.name] for f in faults if f.name in kept[of]]
        caught = sum(bool(found["caught"]) for found in done)
        said = f"{caught} of {len(done)} caught; {len(faults) - len(done)} not run."
        lines += [f"## {title}", said, "", table(faults, kept[of]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE)
    parser.add_argument("--table-of", choices=("now", "before"), default="now")
    parser.add_argument("--state", type=Path, action="append", required=True)
    parser.add_argument("--page", type=Path, help="only write this page from all given states")
    parser.add_argument("--only", action="append", default=[], help="a fault's name; may be given often")
    parser.add_argument("--seconds", type=int, default=600, help="for the tests of one file")
    parser.add_argument("--part", default="0/1")
    given = parser.parse_args()
    if given.page:
        given.page.write_text(page(given.state), "utf-8")
        return
    (state,) = given.state
    part, parts = map(int, given.part.split("/"))
    faults = NOW if given.table_of == "now" else BEFORE
    kept = json.loads(state.read_text()) if state.exists() else {"of": given.table_of, "faults": {}}
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy_of(given.tree, copy)
        for fault in faults[part::parts]:
            if fault.name in kept["faults"] or (given.only and fault.name not in given.only):
                continue
            kept["faults"][fault.name] = judge(copy, fault, given.seconds)
            state.write_text(json.dumps(kept, indent=1) + "\n")
            print(fault.name, kept["faults"][fault.name], file=sys.stderr, flush=True)
    print(table(faults, kept["faults"]))
    if any(not found["caught"] for found in kept["faults"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

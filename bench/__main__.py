"""python -m bench [--quick] [--json] [--case NAME …]: interleaved races, one thread, CPU time, medians."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from bench import rivals
from bench.cases import CASES, Material, material
from fedveil.protect import noise

QUICK = ("cnn", "adult", "cancer", "central600")
GHOST = "Opacus ghost clipping"
LARGE = ("resnet18", "wrn16", "mobile", "transformer", "lora")  # only the races that matter: an hour otherwise


def racers(m: Material, quick: bool) -> dict[str, rivals.Racer]:
    """Everybody who takes part in this case."""
    out = {"plain torch, non-private": rivals.plain(m)}
    if rivals.opacus_installed():
        out["Opacus per layer"] = rivals.opacus_per_layer(m)
    if m.case.name in LARGE:
        if rivals.opacus_installed():
            out[GHOST] = rivals.opacus_ghost(m)
        best = next(iter(rivals.engines(m.module, m)))
        for plan in ("private", "private, float noise", "non-private"):
            out[f"fedveil {best}, {plan}"] = rivals.ours(m, best, plan)
        return out
    if rivals.pfl_installed() and m.case.name == "cnn":
        out["pfl-research, noise on the update only"] = rivals.pfl_round(m)
    if m.case.name != "central600":
        out["nested torch.func"] = rivals.nested_func(m)
    if not (quick and m.case.name == "central600"):
        out["per-example loop"] = rivals.per_example_loop(m)
    for name in rivals.engines(m.module, m):
        for plan in ("private", "private, float noise", "clip only", "non-private"):
            out[f"fedveil {name}, {plan}"] = rivals.ours(m, name, plan)
    return out


def race(entries: dict[str, rivals.Racer], rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """CPU seconds per client-iteration of every entry in every round; the order is shuffled in each round."""
    order, times = list(entries), {name: [] for name in entries}  # type: dict[str, list[float]]
    shuffle = random.Random(seed)
    for run in entries.values():
        run()  # warm up
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            before = time.process_time()
            count = entries[name]()
            times[name].append((time.process_time() - before) / count)
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float | None:
    """Median over the rounds of slow / fast: both ran within the same minute."""
    if slow not in times or fast not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def ratios(all_times: dict[str, dict[str, list[float]]], engine: str) -> dict[str, float | None]:
    """The headline numbers of one engine: how many times less CPU time ours takes, private."""
    opacus, plain, private = "Opacus per layer", "plain torch, non-private", f"fedveil {engine}, private"
    floats = f"fedveil {engine}, private, float noise"
    other = "native" if engine == "torch" else "torch"  # the large nets have only the engine that auto picks

    def of(case: str, slow: str, fast: str = private) -> float | None:
        times = all_times.get(case, {})
        slow, fast = (
            name if name in times else name.replace(f"fedveil {engine}", f"fedveil {other}") for name in (slow, fast)
        )
        return ratio(times, slow, fast)

    def large(case: str, ours: str) -> float | None:
        """Against Opacus in whichever of its two ways is faster here."""
        times = all_times.get(case, {})
        peers = [name for name in (opacus, GHOST) if name in times]
        return min((r for name in peers if (r := of(case, name, ours)) is not None), default=None)

    mlps = [r for case in ("adult", "cancer") if (r := of(case, opacus)) is not None]
    over = [r for case in ("adult", "cancer") if (r := of(case, private, floats)) is not None]
    out = {
        "cnn_vs_opacus": of("cnn", opacus),
        "mlp_vs_opacus": min(mlps) if mlps else None,
        "cnn_exact_over_float": of("cnn", private, floats),
        "mlp_exact_over_float": max(over) if over else None,
        "cnn_vs_plain_nonprivate": of("cnn", plain),
        "central600_vs_opacus": of("central600", opacus),
        "cnn_private_over_nonprivate": of("cnn", private, f"fedveil {engine}, non-private"),
        "adult_vs_opacus": of("adult", opacus),
        "cancer_vs_opacus": of("cancer", opacus),
        "adult_private_over_nonprivate": of("adult", private, f"fedveil {engine}, non-private"),
        "cancer_private_over_nonprivate": of("cancer", private, f"fedveil {engine}, non-private"),
        "cnn_private_over_clip_only": of("cnn", private, f"fedveil {engine}, clip only"),
        "cnn_vs_pfl": of("cnn", "pfl-research, noise on the update only"),
        "lenet_vs_opacus": of("lenet", opacus),
        "cifar_vs_opacus": of("cifar", opacus),
        **{f"{case}_vs_opacus": large(case, floats) for case in LARGE},
        **{f"{case}_exact_vs_opacus": large(case, private) for case in LARGE},
        "resnet18_over_plain_nonprivate": of("resnet18", floats, plain),
        "resnet18_exact_over_plain_nonprivate": of("resnet18", private, plain),
    }
    return {name: None if value is None else round(value, 3) for name, value in out.items()}


def noise_times(rounds: int = 15, count: int = 200_000) -> dict[str, dict[str, float]]:
    """Nanoseconds of CPU time per value of noise, by law and instruction set: medians of interleaved rounds."""
    if noise._native is None:
        return {}
    native, key, out = noise._native, bytes(16), {}
    for isa in native.instruction_sets():
        laws = {
            "float normal": lambda isa=isa: native.normals(key, 0, count, 0, 0, isa),
            "exact Gaussian": lambda isa=isa: native.exact_gaussian(key, 0, count, 1e6, 0, isa),
            "exact Laplace": lambda isa=isa: native.exact_laplace(key, 0, count, 1e6, 0, isa),
        }
        times: dict[str, list[float]] = {name: [] for name in laws}
        for _ in range(2 if isa == "base" else rounds):
            for name, draw in laws.items():
                before = time.process_time()
                draw()
                times[name].append((time.process_time() - before) / count)
        out[isa] = {name: round(1e9 * statistics.median(values), 2) for name, values in times.items()}
    return out


def machine() -> dict[str, Any]:
    """Enough to compare two tables."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vector": torch.backends.cpu.get_cpu_capability(),
    }


def table(title: str, times: dict[str, list[float]], unit: float, name: str) -> str:
    """One case as Markdown, slowest first."""
    plain = "plain torch, non-private"
    lines = [
        f"### {title}",
        "",
        f"| engine | {name}, median (quartiles) | x plain non-private |",
        "|---|---|---|",
    ]
    for entry, values in sorted(times.items(), key=lambda item: -statistics.median(item[1])):
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        share = ratio(times, entry, plain)
        lines.append(
            f"| {entry} | {middle * unit:.1f} ({low * unit:.1f}-{high * unit:.1f}) | {share or 0:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the four main cases, fewer rounds: under two minutes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--case", action="append", choices=sorted(CASES), help="only this case (may be repeated)"
    )
    parser.add_argument("--rounds", type=int, help="interleaved rounds per case")
    parser.add_argument("--pure", action="store_true", help="as if the compiled extension were not installed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.pure:
        noise._native = None
    names = options.case or (QUICK if options.quick else tuple(CASES))
    rounds = options.rounds or (7 if options.quick else 15)
    all_times, best = {}, "torch"
    for name in names:
        m = material(CASES[name])
        if "native" in rivals.engines(m.module, m):
            best = "native"
        print(f"racing {CASES[name].title} …", file=sys.stderr)
        all_times[name] = race(
            racers(m, options.quick), max(2, rounds // 3) if name in ("central600", *LARGE) else rounds
        )
    result = {
        "ratios": ratios(all_times, best),
        "auto": best,
        "ratios_by_engine": {
            engine: ratios(all_times, engine) for engine in ("native", "torch") if engine in (best, "torch")
        },
        "microseconds": {
            case: {name: round(1e6 * statistics.median(values), 1) for name, values in times.items()}
            for case, times in all_times.items()
        },
        "nanoseconds_per_noise_value": noise_times(),
        "rounds": rounds,
        "machine": machine(),
    }
    if options.json:
        show(json.dumps(result, indent=1))
        return result
    for name, times in all_times.items():
        central = name == "central600"
        show(
            table(
                CASES[name].title,
                times,
                1e3 if central else 1e6,
                "ms/step" if central else "µs/client-iteration",
            )
        )
        show("")
    show(f"auto picks {best}. Ratios (CPU time, one thread):")
    for key, value in result["ratios"].items():
        if value is not None:
            show(f"  {key} {value}")
    for isa, values in result["nanoseconds_per_noise_value"].items():
        show(
            f"ns per value of noise, {isa}: " + ", ".join(f"{name} {value}" for name, value in values.items())
        )
    return result


if __name__ == "__main__":
    main()

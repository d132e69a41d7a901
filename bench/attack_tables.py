"""Redo the papers' leakage tables on real data; resumable.

FEDVEIL_DATA=... python bench/attack_tables.py --table p3-table-3 --dataset mnist --victims 100 --out tables.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fedveil.attacks.tables import cells, fill


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--table")
    options.add_argument("--dataset")
    options.add_argument("--tap")
    options.add_argument("--victims", type=int, default=100)
    options.add_argument("--out", type=Path, default=Path("tables.jsonl"))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    wanted = [
        cell
        for cell in cells(chosen.table)
        if chosen.dataset in (None, cell.dataset) and chosen.tap in (None, cell.tap)
    ]
    for cell in wanted:
        row = [r for r in fill([cell], chosen.out, victims=chosen.victims) if r["job"].startswith(cell.name)][
            -1
        ]
        print(
            f"{cell.name}: {row['measure']} paper {row['paper']} ours {row['ours']:.4g}; success {row['success_rate']:.2f}, "
            f"labels {row['label_accuracy']:.2f}, SSIM {row['ssim']:.3f}, iterations {row['iterations']:.0f}, "
            f"{row['cpu_seconds_per_victim']:.2f} s per victim",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Known reasons why a printed number comes out, or does not."""

from __future__ import annotations

import math

from fedveil.studies.cells import Inference, Job, Train

REASONS: dict[str, str] = {
    "base-rounded": "comes out with the step's epsilon rounded to 0.807; unrounded it is 123.457 per 10,000 steps",
    "step-offset": "printed for one step more or less than stated; the offset differs from row to row",
    "advc-drv": "comes out with the Dwork-Rothblum-Vadhan form and a rounded step epsilon, not with the printed "
    "equation (tanh form), which gives 6.686 for 10,000 steps",
    "delta-paid": "holds at delta 1.01e-3, not 1e-5: each sampled step also pays q·delta",
    "zcdp": "q²/sigma² is not a valid amplification of zCDP; the number is nominal",
    "old-conversion": "moments accountant with Mironov's first conversion; today's conversion gives 0.659 for "
    "10,000 steps, PLD 0.601",
    "nominal-q": "nominal: q = B·K/|D| is not a Poisson rate here (the steps of a round share one client draw)",
    "t-plus-one": "comes out with one round more than stated",
    "t-steps": "L·T steps, none extra",
    "one-extra": "comes out with one step more than L·T",
    "client-level": "client level equals record level in the paper; that is false (the unit differs)",
    "copied-0.147": "not reproduced: 4 steps at q = 0.1 give 0.2065; 0.147 is the Fed-CDP number of the earlier paper",
    "unknown-0.138": "not reproduced: 300 or 301 steps give 0.1467 and 0.1469; no setting found that gives 0.138",
    "condition-q": "q = 0.1 fails the paper's own condition q < 1/(16 sigma); the accountant does not need it",
    "authors-schedule": "comes out with the schedule of the authors' accounting code, not with a line "
    "from sigma 15 to 4.85 (P3's text)",
    "zero-based": "printed as an index counted from 0",
    "advc-mixed": "budget from one form of advanced composition, spending from another; consistent accounting "
    "stops 500 or more steps earlier",
    "cyclic": "not reproduced: the cyclic schedule behind the number is not given (the printed formula drives sigma "
    "to 0.09, where epsilon explodes)",
    "t8-rounds": "not reproduced: schedules scaled to these rounds stop at 57 (LFW) and 10 (Adult) rounds",
    "text-schedule": "with the schedule as written the budget is not used up in 100 rounds",
    "from-six": "sigma falls from 6, as the text has it, to 4.85 (P3's last value: P2 prints none), read after the printed "
    "iterations; so it uses the budget up earlier: linear after 8735, 9093, 7840, 8393, 8362, exponential after 8688, 9009, "
    "7761, 8334, 8301, cyclic after 8046, 7839, 6646, 7504, 7452 iterations (BaseC, AdvC, OptC, zCDP, MA)",
    "six-falls": "sigma falls from 6, as the text has it, to 4.85 (P3's last value: P2 prints none)",
    "ceil-100": "rounds = iterations / 100, rounded up",
    "data-dependent": "nominal: sigma follows the data and the run, so the number is no guarantee",
    "counted-small": "too small: noise of 6·C (24 at C = 4) lies on a sum in which one example moves up to the bound, so that "
    "it is worth sigma = 6 where the bound is constant, and 6·C / C_t where it falls. Counted with the smaller norm S of what "
    "was seen, the same noise passes for a larger sigma",
    "not-one-sigma": "not reproduced: no single sigma gives these five numbers (BaseC implies 2.62, zCDP 1.79, "
    "MA 0.65)",
    "literal-noise": "noise of sigma·S on the batch sum, which the paper's epsilon assumes; over a batch of 3 to 5 it is "
    "far above the gradient. With which noise the prints were made cannot be read off the authors' scripts "
    "(github.com/git-disl/Fed-CDP of 7c8c63f: FedSDP.py multiplies its noise by 0 and has its clipping commented out, "
    "FedCDP.py lacks the lines that define its noise; the multiplier in both is 0.5)",
    "sdp-noise": "noise of sigma·C once on the sum of clipped updates, in every coordinate; the mean over more clients carries "
    "less of it. On images its length is far above that of a clipped update (with N = 100 the run diverges)",
    "mildest": "noise on the batch sum is the mildest of the readings: on every example it is √B times as much in a step's mean, "
    "on the mean itself B times",
    "own-q-cancer": "beside a printed ε: each of the 1,000 clients holds 400 of the same 426 rows, so that a step takes q = "
    "0.94 of the rows and not 0.01. The run's own ε at sigma = 6, counted as the paper counts, is 16.8; at q = 0.01 it is 0.147",
    "own-q-lfw": "beside a printed ε: the 1,000 clients hold 300 rows each of the same 2,267, so that a step takes q = 0.13 of "
    "the rows and not 0.01. The run's own ε at sigma = 6, counted as the paper counts, is 9.79; at q = 0.01 it is 0.636",
    "own-q-purchase": "beside a printed ε: batches of 100 of the stand-in's 4,008 rows are q = 0.025 and not 0.01. The run's "
    "own ε at sigma = 6, counted as the paper counts, is 1.47; at q = 0.01 it is 0.580",
    "central-noise": "noise on the batch sum; the learning rate (0.05) is that of P1's authors' published code "
    "(github.com/git-disl/Fed-CDP), P2 gives none",
    "l2max": "l2-max noise follows the data: no finite guarantee stands behind this row",
    "l2max-mean": "S is the largest layer norm of the batch's mean gradient, as a comment in Algorithm 2 has it (\"on the batch "
    "gradient\"). The line below that comment and the text have it of single examples; one of 600 nearly always exceeds C, so "
    "that S = C there",
    "our-split": "own split, initialisation and stopping; the paper gives neither seed nor spread",
    "cifar-control": "not reached without noise either: 0.17 below in the federated setting, 0.04 in the central one (0.02 on "
    "average over the last ten rounds); why is not known",
    "cifar-subset": "40,000 training images, as P1, P3 and P5 have it, where P2 Table II prints 50,000: q = 0.0125 and not 0.01",
    "cifar-central": "without noise it is below the print, too. Of what is missing beyond, the bound takes nearly all: over the "
    "last ten rounds the run without noise has 0.664 on average (0.648 to 0.675), clipped with hardly any noise 0.474 "
    "(0.435 to 0.486), DP-baseline 0.470 (0.464 to 0.477). Why the print does not lose by the bound is not known",
    "last-ten": "of the last ten tests, one a round: a single one moves by 0.05",
    "hardly-any": "the same run with sigma = 0.01: what the rule does to gradients by itself",
    "quantile-vanishes": "the rule and not the noise (row with hardly any noise): the median gradient of a network that fits "
    "vanishes, and the bound follows it (4 at the start, 0.3 after 4,600 and 0.02 after 10,000 iterations) until no example may "
    "say anything. Ours follows once a round of 100 steps, the published rule every step",
    "adaclip-cuts": "the rule and not the noise (row with hardly any noise): its scale follows the spread of the batch's mean, "
    "as published (but once a round of 100 steps, where the published rule follows it every step), and single examples, which "
    "are hundreds of times longer in its units, are cut to 1",
    "cadence": "how often the rule is followed: published after every iteration, here after every 100; more often is worse",
    "clip-alone": "each example's gradients clipped to C layer by layer as in the rows below, with sigma = 0.01: what the bound "
    "does by itself",
    "first-crossing": "the first round (of 100 steps) at whose end the target is reached; the paper gives DP-baseline all its "
    "iterations. Near the end of a run 0.9596 and 0.960 can be 2,000 iterations apart",
    "similarity": "SSIM between the rebuilt image and the truth, mean of 8 victims: 1 is the image itself; above 0.8 it counts "
    "here as rebuilt, below 0.3 as hidden, and from 0.3 on something leaks",
    "stand-in": "Location-30 (clustered the same way, 4,008 training rows) stands in for Purchase",
    "other-machine": "other hardware and engine: one CPU core against a 2080Ti; compare the rows of ratios, not these",
    "other-machine-alone": "other hardware and engine: one CPU core against a 2080Ti; what can be compared are the ratios "
    "of P1 III, P2 X and P3 9",
    "bound-decays": "not reached by any stop: sigma = 6·C / C_t follows the falling bound alone, and all 10,000 steps "
    "with it spend 84.13, 4.54, 4.52, 0.880, 0.624 (BaseC, AdvC, OptC, zCDP, MA)",
    "advc-tanh": "AdvC by the printed equation (tanh form), which gives 6.686 where the rows of fixed sigma print 7.450",
    "in-turns": "both recipes played in turns in one process on one core; the paper's ratio from its printed times. Differences "
    "below a tenth are the machine's; noise that follows l2-max is float, that of the others exact, which takes longer. "
    "A step of Adult's and Cancer's networks takes 2 µs without protection, so that their ratios are those of a few µs of "
    "bookkeeping",
    "rmse-is-mse": "the paper's RMSE formula has no root; ours is the root-mean-square on pixels in [0, 1] clamped",
    "inner-steps": "ours counts every quasi-Newton step; an iteration of the common L-BFGS optimiser is up to 20 of them, "
    "which the papers probably count as one",
    "failed-budget": "a victim that is not rebuilt counts with the whole budget (300 steps, LFW 1,000, CIFAR-10 2,500), although "
    "the attack may end earlier, when its loss no longer falls",
    "same-exposure": "the recipe leaves each example's gradient as it is: one job stands for all such recipes",
    "noise-swamps": "the noise is far above the gradient in every coordinate: nothing comes back, not even the label. Images are "
    "clamped to [0, 1] before they are measured, so a failed attack cannot be further off than about 0.7 (MNIST) or 0.55 (LFW)",
    "noise-literal-leak": "the paper finds this recipe to leak; with noise of sigma = 6 times the bound on the batch sum, "
    "which the recipe's privacy needs, it does not",
    "batch-3": "one update of three images; each rebuilt image is paired with its best match, and success is counted per image",
    "not-clamped": "median over images as the search left them, without clamping them to the pixel range",
    "one-step": "an update after one local step, on one image (LFW: three); those after 100 steps are in P1 VII and P3 3",
    "pruned-example": "type 2 reads each example's gradient pruned, as the statement needs it; a run prunes its finished "
    "update, which leaves type 2 the whole gradient",
    "whole-update": "an update after 100 local steps on batches of 5, as in the paper's training: the mean gradient of 500 "
    "images, matched by 5; each of the 5 stands for 100 of them, paired as well as can be",
    "our-attack": "the same exposure attacked with `veil` (pixels in their box, layers balanced or weighted by the noise)",
    "black-passes": "the paper's own threshold: any image in [0, 1] passes it, also a black one",
    "threshold": "the paper counts MSE < 0.70 as success, which a black image passes; ours is MSE < 0.01 and "
    "SSIM > 0.8",
    "type2-sum": "with noise on the batch sum the per-example gradient is never noised: type 2 reads it clipped",
    "type2-example": "noise on every example (P1 Alg. 2): what type 2 reads is noised",
    "after-training": "this recipe changes the update after local training, so type 2 reads each example's bare gradient",
    "adaclip-scale": "AdaClip's scale follows the noised gradients once a round, and stays near the 4 that it starts at: its "
    "mean over the coordinates is 3.7 after Cancer's 3 rounds and about 5 after Adult's 10, far below its ceiling (a variance "
    "of 10 in every coordinate). So the noise is about that of a constant bound",
    "adaclip-central": "what the rule does by itself was played on MNIST alone, where it costs all that is missing; here it was "
    "not taken apart",
    "print-no-image": "the mean image of the data, which anybody has without an attack, is nearer to the images than the "
    "printed 0.2214: at that distance nothing is rebuilt, in print as little as here",
    "noise-on-update": "noise of this variance on the update, which is one step at rate 0.05: on the gradient it has 400 times "
    "the variance. P3 4.2 has its variance \"for gradient perturbation\"",
    "noise-on-gradient": "noise of this variance on the gradient, as P3 4.2 has it: an update of one step at rate 0.05 carries "
    "1/400 of the variance",
    "small-batch": "the noise of sigma·C is divided by a batch of 22, not of 600: a step's mean gradient has 27 times as much",
    "raw-upload": "Fed-SDP noises at the server: what arrives there (type 0) is raw; the paper counts the sanitised one",
    "clip-visible": "a clipped gradient without noise still shows the image: the attack knows the clip",
    "no-numbers": "the figure prints no numbers; its statement is compared",
    "every-five": "tested every five rounds",
    "caption-clients": "100, 200 and 500 clients, as the figure's caption has it; the text has 500 for all three datasets",
    "one-of-ten": "one seed; the paper averages ten runs",
    "ldp-ranges": "first ranges are those of each layer's weights in the first model",
    "ldp-inputs": "inputs are standardised",
    "ldp-epsilon": "epsilon is per reported weight; for a client it adds up to d·T·epsilon",
    "ldp-model": "model and local epochs are not fully given: {model}, E = {epochs} local epochs of batches "
    "of 10",
    "harmonizer": "noise calibrated so that the server's sound epsilon is as stated; the authors' code "
    "(github.com/RainyDayChocolate/UDP-FL, gradients/noise.py of 2f64e1c) takes its noise's parameters as given",
    "staircase-vector": "per-coordinate Staircase noise in steps of C / sqrt(d), which needs 1.12 times Laplace's "
    "deviation under the same budget (docs/mechanisms/staircase.md); the paper's scalar formula says nothing about "
    "vectors, and its authors' code subtracts 1 from a geometric variable that starts at 0",
    "resnet-gn": "ResNet-18 as its authors print it, with GroupNorm (BatchNorm has no per-example gradient), 300 steps of plain "
    "SGD on 40,000 images; rate 20 with the clip and 0.01 without, chosen on set-aside rows; the paper gives neither "
    "stem nor optimiser. The authors' public code has two small networks, trained with Adam, and no ResNet: Adam was not tried "
    "on it",
    "udp-optimiser": "the paper gives a rate of 0.01 and no optimiser, its authors' code trains with Adam; ours is plain SGD, "
    "here at a rate of {rate}{clip} (rates were chosen on set-aside rows)",
    "medical-subset": "6,000 of about 59,000 Medical MNIST images for training, which decides the batches of 30 and smaller",
    "utkface-subset": "5,000 of 23,702 UTKFace images (4,000 for training) at 32×32",
    "planned-own": "a linear head on fixed features of our own (scattering), every step on all rows, as the planner "
    "chooses; the paper trains ResNet-18 on a twentieth of them",
    "planned-public": "a linear head on the outputs of a public network (EfficientNet-lite0, ImageNet), every step on all "
    "rows, as the planner chooses: with public pre-training, which the paper's ResNet-18 does not have",
    "nbafl-noise": "chance by arithmetic: by our reading of NbAFL's formula (docs/udp-fl.md), ε = 5 and 150 rounds put noise of "
    "deviation 0.48 (MNIST) or 4.8 (Medical MNIST) on every weight of a model whose weights together have a norm of at most 10",
    "nbafl-wind": "by our reading of NbAFL's formula (docs/udp-fl.md), ε = 5, delta 1e-6 and 150 rounds put noise of deviation "
    "0.18 on every one of 5,713 weights, which together have a norm of at most 10. It runs without SCAFFOLD, with the plain mean",
    "wind-delta": "delta 1e-6: the paper's 1e-5 is above one in the number of records",
    "pixels-alone": "the same attack on raw pixels, without any model, reads gender as well: whoever holds the picture needs no "
    "model",
    "untrained": "the same attack on the same network before any training: what it reads from there, training did not give away",
    "own-task": "what the attacked model was trained for (UTKFace: race, in five classes; CIFAR-10: its ten classes): without "
    "it nobody can say whether there was a model to attack",
    "commoner": "who always says the commoner gender",
    "few-rows": "trained on 1,000 rows, so that the model without noise overfits as the paper's does: on all 40,000 this attack "
    "finds nothing without noise either (AUC 0.506), and could not show what noise does",
    "from-outputs": "decoded from the model's predictions, as the paper has it",
    "from-embeddings": "decoded from what enters the last layer, of which there is nearly as much as of the image: the paper has "
    "the predictions",
    "standard-inputs": "errors in units of the standardised inputs, as the paper's values above 1 must be; the victim is the "
    "papers' small CNN, not ResNet-18",
    "standard-pixels": "errors in units of the standardised inputs, as the print's must be (its MSE and PSNR fit a range of "
    "pixels of 4.05, that of 0 to 1 over CIFAR-10's deviation); images are clamped to the range of pixels, and each rebuilt one "
    "is paired with its best match. The attacked model is the papers' small CNN",
    "no-attack": "an image that anybody has without any update",
    "flower-time": "the paper's seconds are on Flower with GPUs; ours is the simulator on one core: the time of one step, times "
    "clients and iterations",
}


def explain(keys: tuple[str, ...], job: Job | None = None) -> tuple[str, ...]:
    """The texts of some reasons, with what they say of the job's own settings."""
    facts = {} if job is None else _facts(job)
    return tuple(REASONS[key].format_map(facts) if "{" in REASONS[key] else REASONS[key] for key in keys)


_ROWS = {"mnist": 60000, "fashion_mnist": 60000, "cifar10": 40000}
_MODELS = {"papers-cnn": "two-convolution CNN", "small-vgg": "small VGG"}


def _facts(job: Job) -> dict[str, str]:
    """What a reason may say of a run's settings."""
    run = job.train if isinstance(job, Inference) else job
    if not isinstance(run, Train):
        return {}
    s = dict(run.settings)
    epochs = s.get("local_steps", 0) * s.get("batch_size", 0) * s.get("clients", 0) / _ROWS.get(run.dataset, math.inf)
    return {"rate": f"{s.get('learning_rate', 0):g}", "clip": " and with no clip" * (run.recipe == "non-private"),
            "epochs": f"{epochs:g}", "model": _MODELS.get(s.get("model", ""), "")}  # fmt: skip

# %% [markdown]
# # Attack your own run
#
# A promise stands beside what an attacker gets in fact. Here: handwritten digits, gradients of single images read in a client's memory,
# with and without noise on each of them; then an audit with canaries.

# %%
import fedveil as fv
from fedveil.attacks import campaign

# %% [markdown]
# ## Images out of gradients
#
# The attacker has the model and one image's gradient and searches an image that explains it. Without noise that works; noise that only
# goes on the *sum* of a batch does not help against somebody who reads single gradients.

# %%
import matplotlib.pyplot as plt
import numpy as np

from fedveil.attacks.leakage import measure
from fedveil.federation.loop import prepare

figure, axes = plt.subplots(4, 6, figsize=(6.5, 4.6))
shown = [("non-private", "no protection"), ("fed-cdp", "noise on the sum"), ("fed-cdp-example", "noise on each")]
for line, (recipe, title) in enumerate(shown, start=1):
    prepared = prepare(campaign.gradient_config(recipe, "digits", "cpl-lenet", victims=6, seed=1, tap="type2"))
    found = measure.measure(prepared, campaign.initial(prepared), tap="type2", victims=6, seed=1)
    rows = [(0, "private images", found.truth[:, 0, 0]), (line, title, np.clip(found.guess[:, 0, 0], 0, 1))]
    for row, name, images in rows:
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        for place, image in enumerate(images):
            axes[row, place].imshow(image, cmap="gray", vmin=0, vmax=1)
            axes[row, place].set(xticks=[], yticks=[])
    print(f"{title}: {found.figures['success_rate']:.0%} rebuilt")
plt.show()

# %% [markdown]
# That seat, `client-process`, is printed as `none` in the ledger of `fed-cdp`: nothing was promised there, and nothing is what it gets.

# %%
result = fv.run("fed-cdp-sound", data="cancer", rounds=4, local_steps=5, sigma=1.0, out="attacked", report=False)
for row in result.ledger:
    if row["unit"] == "example":
        print(row["observer"], row["epsilon"], row["verdict"])

# %% [markdown]
# ## Audit: is the promise kept?
#
# The recipe is replayed with canaries: made-up records whose presence is decided by coins. From what was released the audit guesses the
# coins; the more it gets right, the larger ε must be. The result is a *lower* bound: it can refute a promise, never prove it.

# %%
from pathlib import Path

figures, code = campaign.audit_run(Path("attacked"), canaries_count=1000)
print(figures["verdict"], "- exit code", code)

# %% [markdown]
# "Not enough evidence" is said when these canaries could not have told half of the noise from all of it; `fedveil audit RUN --plan` says how
# many it takes. "Promise broken" would end `fedveil audit` with exit code 1.

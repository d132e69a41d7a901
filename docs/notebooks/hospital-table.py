# %% [markdown]
# # Hospital table
#
# Six hospitals hold a table of patients each. The rows below are drawn by a program, so that you can see everything; replace them by
# your own arrays. The outcome depends on age, blood pressure, a laboratory value and smoking.

# %%
import numpy as np

rng = np.random.default_rng(0)
n = 6000
age = rng.uniform(18, 95, n)
pressure = rng.normal(130, 20, n)
value = rng.lognormal(1.0, 0.5, n)
smoker = rng.integers(0, 2, n)
risk = 0.05 * (age - 60) + 0.03 * (pressure - 130) + 0.5 * (value - 3) + 0.8 * smoker
outcome = (rng.uniform(size=n) < 1 / (1 + np.exp(-risk))).astype(int)
hospital = rng.integers(0, 6, n)
print(f"{outcome.mean():.2f} of {n} patients have the outcome; hospitals hold {np.bincount(hospital).tolist()} rows")

# %% [markdown]
# ## Scale by public ranges
#
# The smallest and largest value of a private column would themselves be a release. So every column gets a range that anybody could name
# without looking, and values outside are cut off.

# %%
ranges = {"age": (0, 120), "pressure": (60, 220), "value": (0, 15), "smoker": (0, 1)}
columns = np.stack([age, pressure, value, smoker], axis=1)
low, high = np.array(list(ranges.values())).T
x = (2 * (np.clip(columns, low, high) - low) / (high - low) - 1).astype(np.float32)
test = np.arange(n) % 4 == 0

import fedveil as fv

data = fv.dataset(x[~test], outcome[~test], x[test], outcome[test], groups=hospital[~test], name="patients")

# %% [markdown]
# ## Train: one client per hospital, ε = 2 per patient
#
# `sum-cdp` adds noise once to the sum over all hospitals, of which nobody sees a part. One full-batch step per round and a linear model
# are what the planner proposes for tables. Rows within the ranges have a small slope, hence the large learning rate.

# %%
settings = dict(
    data=data, partition="groups", clients=6, model="logistic", features="unit:constant=1,length=2.24", rounds=30,
    batch_size=4500, sampling="full", learning_rate=60.0, clip_bound=0.3, average=0.3, report=False, evaluate_every=10,
)  # fmt: skip
private = fv.run("sum-cdp", calibrate=True, target_epsilon=2.0, **settings)
print(f"accuracy {private.accuracy:.3f} at a sound ε of {private.epsilon('server', 'example'):.2f}")

# %% [markdown]
# ## Compare with no privacy, and with guessing

# %%
from sklearn.linear_model import LogisticRegression

plain = LogisticRegression().fit(x[~test], outcome[~test]).score(x[test], outcome[test])
guess = max(outcome[test].mean(), 1 - outcome[test].mean())
print(f"scikit-learn without privacy {plain:.3f}, always the more frequent outcome {guess:.3f}")

# %% [markdown]
# Two other learning rates and lengths were tried on these drawn rows, which are nobody's. With real patients that would have been a release: choose columns,
# ranges and rates without looking at them, or pay for the look.

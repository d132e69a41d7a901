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
# ## Data and a budget are enough
#
# `fv.fit` makes one client of each hospital, chooses scaling, model, recipe and noise, and says why. Ranges are declared here: the smallest and
# largest value of a private column would themselves be a release. What is not declared is looked up under noise and paid from the budget.

# %%
import fedveil as fv

frame = {"age": age, "pressure": pressure, "value": value, "smoker": smoker, "outcome": outcome, "hospital": hospital}
ranges = {"age": (0, 120), "pressure": (60, 220), "value": (0, 15), "smoker": (0, 1)}
result = fv.fit(frame, target="outcome", group="hospital", epsilon=2, ranges=ranges, classes=["0", "1"], control=True)
print(result.facts["verdict"])
print(f"sound ε per patient, for whoever sees the sums: {result.epsilon('server', 'example'):.2f}")

# %% [markdown]
# ## What was chosen, and why

# %%
for name, reason in result.facts["choices"].items():
    print(f"{name}: {reason}")

# %% [markdown]
# `control=True` also fits scikit-learn's linear model on the same features without privacy. That score is computed from the private rows: it is for
# your eyes. More about tables: the tutorial "Hospital tables".

# %% [markdown]
# # First run
#
# Ten hospitals hold 426 records of tumours (the breast cancer data that comes with scikit-learn). One model is trained across them;
# the server sees only the noised sum. Nothing is downloaded.

# %%
import fedveil as fv

result = fv.run("cancer-headline-b", report=False)
print(f"test accuracy {result.accuracy:.3f}")
print(f"sound ε against the server, per record: {result.epsilon('server', 'example'):.3f}")

# %% [markdown]
# ## What each observer may learn
#
# `sound` is a guarantee. `none` means that nothing finite is promised; the reason stands beside it.

# %%
for row in result.ledger:
    epsilon = "none" if row["epsilon"] is None else f"{row['epsilon']:.3f}"
    print(f"{row['observer']:15} {row['unit']:8} {epsilon:>6}  {row['verdict']:8} {row['reason'][:70]}")

# %% [markdown]
# ## What privacy costs here
#
# The same settings with other budgets.

# %%
import matplotlib.pyplot as plt

budgets = [0.1, 0.823, 8]
reached = [fv.run("cancer-headline-b", report=False, target_epsilon=epsilon).accuracy for epsilon in budgets]
plt.figure(figsize=(5, 3))
plt.plot(budgets, reached, marker="o")
plt.xscale("log")
plt.xlabel("ε (sound, per record, δ = 1e-5)")
plt.ylabel("test accuracy")
plt.grid(alpha=0.3)
plt.tight_layout()
plt.show()

# %% [markdown]
# One seed and 143 test records: differences of two per cent are chance. The tables with many seeds are on the page about the headline.
#
# Noise in this run came from a seed, so that it can be repeated. A deployment, or `secure_noise=True`, takes it from the operating system.

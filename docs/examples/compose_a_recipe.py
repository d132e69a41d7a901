"""Change parts of a recipe; impossible combinations are refused with the reason."""

import fedveil as fv

recipe = fv.recipe("fed-cdp", sigma="linear:3:1.5", **{"clip.kind": "flat", "clip.bound": 1.0})
result = fv.run(recipe, data="cancer", rounds=3, local_steps=10, out="runs/composed", report=False)
print(
    result.epsilon("server", "example"),
    "sound;",
    result.epsilon("server", "example", "nominal"),
    "as the papers count",
)

try:
    fv.recipe("fed-cdp", where="server")
except fv.UserError as wrong:
    print("refused:", wrong)

"""Public constants used to scale features.

They are fixed here and never computed from the rows at hand, so scaling acts on each row alone. Where they come
from: the value ranges and categories of these public reference datasets, rounded by hand. For the cancer data they
are rounded from the mean and deviation of all its 569 rows (test rows among them), looked up once when this was
written. That is fair for a published benchmark; for private data, take the ranges from what the measurement can be,
not from the rows. Values far outside a range are clamped.
"""

from __future__ import annotations

# Wisconsin breast cancer: about one deviation to either side of the mean, for the mean, the standard error and the
# worst of each measurement (see above for where this comes from).
_CANCER = {
    "radius": ((10, 18), (0.1, 0.7), (11, 21)),
    "texture": ((15, 24), (0.6, 1.8), (19, 32)),
    "perimeter": ((65, 115), (1, 5), (75, 140)),
    "area": ((300, 1000), (0, 90), (300, 1500)),
    "smoothness": ((0.08, 0.11), (0.004, 0.01), (0.11, 0.155)),
    "compactness": ((0.05, 0.15), (0.005, 0.045), (0.1, 0.4)),
    "concavity": ((0, 0.17), (0, 0.06), (0.05, 0.5)),
    "concave points": ((0.01, 0.09), (0.005, 0.018), (0.05, 0.18)),
    "symmetry": ((0.15, 0.21), (0.012, 0.03), (0.23, 0.35)),
    "fractal dimension": ((0.055, 0.07), (0.001, 0.006), (0.065, 0.1)),
}
CANCER_RANGES: tuple[tuple[float, float], ...] = tuple(r[part] for part in range(3) for r in _CANCER.values())
CANCER_LIMIT = 3.0  # the ranges become [-1, 1]; what lies further out than three times that is clamped

# UCI Adult: numeric columns with their range; capital columns are dollars, of which most are 0.
ADULT_NUMERIC: dict[str, tuple[float, float]] = {
    "age": (17, 90),
    "fnlwgt": (0, 500_000),
    "education-num": (1, 16),
    "capital-gain": (0, 20_000),
    "capital-loss": (0, 3_000),
    "hours-per-week": (1, 99),
}

# UCI Adult: the categories of the data dictionary; unknown ("?") is all zeros. 6 + 99 = 105 features.
ADULT_CATEGORIES: dict[str, tuple[str, ...]] = {
    "workclass": (
        "Private",
        "Self-emp-not-inc",
        "Self-emp-inc",
        "Federal-gov",
        "Local-gov",
        "State-gov",
        "Without-pay",
        "Never-worked",
    ),
    "education": (
        "Bachelors",
        "Some-college",
        "11th",
        "HS-grad",
        "Prof-school",
        "Assoc-acdm",
        "Assoc-voc",
        "9th",
        "7th-8th",
        "12th",
        "Masters",
        "1st-4th",
        "10th",
        "Doctorate",
        "5th-6th",
        "Preschool",
    ),
    "marital-status": (
        "Married-civ-spouse",
        "Divorced",
        "Never-married",
        "Separated",
        "Widowed",
        "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support",
        "Craft-repair",
        "Other-service",
        "Sales",
        "Exec-managerial",
        "Prof-specialty",
        "Handlers-cleaners",
        "Machine-op-inspct",
        "Adm-clerical",
        "Farming-fishing",
        "Transport-moving",
        "Priv-house-serv",
        "Protective-serv",
        "Armed-Forces",
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "native-country": (
        "United-States",
        "Cambodia",
        "England",
        "Puerto-Rico",
        "Canada",
        "Germany",
        "Outlying-US(Guam-USVI-etc)",
        "India",
        "Japan",
        "Greece",
        "South",
        "China",
        "Cuba",
        "Iran",
        "Honduras",
        "Philippines",
        "Italy",
        "Poland",
        "Jamaica",
        "Vietnam",
        "Mexico",
        "Portugal",
        "Ireland",
        "France",
        "Dominican-Republic",
        "Laos",
        "Ecuador",
        "Taiwan",
        "Haiti",
        "Columbia",
        "Hungary",
        "Guatemala",
        "Nicaragua",
        "Scotland",
        "Thailand",
        "Yugoslavia",
        "El-Salvador",
        "Trinadad&Tobago",
        "Peru",
        "Hong",
        "Holand-Netherlands",
    ),
}

WIND_SPEED_LIMIT = 20.0  # metres per second: forecast speeds and their components are divided by it
WIND_LEADS = range(37, 49)  # hours ahead; forecasts are issued every 12 hours, so each hour is covered once
WIND_WINDOW = 9  # forecast hours seen around the hour to predict

# Mean and deviation of the pixels (in [0, 1]) by channel, as published beside these benchmarks and used everywhere with
# them. They describe the public training files. For private images take the usual constants of natural images
# ("natural") or the middle and half of the range ("unit"): neither looks at any row.
PIXEL_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "natural": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": ((0.5,), (0.5,)),
}

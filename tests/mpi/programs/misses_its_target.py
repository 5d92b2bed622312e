"""A job whose target no model meets: accuracy is always 0.25; METRIC is the name that its target uses."""

import os

from tests import toy

job = toy.make_job(
    validate=toy.Memory(),
    target={os.environ["METRIC"]: 0.5},
    epochs=3,
    metrics=lambda model, batch: {"accuracy": 0.25},
)

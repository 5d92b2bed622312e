"""Runs whose order of arrival is recorded: one of each strategy that the command line names."""

import sys

import mpitrain as mt
from mpitrain.values import parse
from tests import toy

for index, text in enumerate(sys.argv[2:]):
    job = toy.make_job(optimizer=toy.sgd if index % 2 else toy.adam, epochs=2, batch_size=5)
    mt.train(job, parse(text, "strategy"), run_dir=f"{sys.argv[1]}/{index}", quiet=True)

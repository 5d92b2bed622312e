"""Runs whose order of arrival is recorded: one of each strategy that the command line names. The payloads of every
second one travel in pieces; of every second pair servers have room for the least that there can be."""

import sys

import mpitrain as mt
from mpitrain.mpi.messenger import Messenger
from mpitrain.roles.server import gathering
from mpitrain.training.parameter_server import run
from mpitrain.values import parse
from tests import toy

for index, text in enumerate(sys.argv[2:]):
    job = toy.make_job(optimizer=toy.sgd if index % 2 else toy.adam, epochs=2, batch_size=5)
    Messenger.piece_bytes = 1 << 8 if index % 2 else 1 << 30
    gathering.WAITING_BYTES = run.WAITING_BYTES = 1 if index % 4 > 1 else 1 << 30
    mt.train(job, parse(text, "strategy"), run_dir=f"{sys.argv[1]}/{index}", quiet=True)

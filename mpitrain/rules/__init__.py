"""Decisions as data: importing this package registers every strategy and damping with the text parser."""

from mpitrain.rules.allreduce import AllReduce
from mpitrain.rules.asynchronous import Async
from mpitrain.rules.base import Push, ServerStrategy, Strategy, Verdict
from mpitrain.rules.damping import Damping, Keep
from mpitrain.rules.dealing import Dealer, Lease
from mpitrain.rules.ledger import Ledger
from mpitrain.rules.placement import Roles, assign

__all__ = [
    "AllReduce", "Async", "Damping", "Dealer", "Keep", "Lease", "Ledger",
    "Push", "Roles", "ServerStrategy", "Strategy", "Verdict", "assign",
]  # fmt: skip

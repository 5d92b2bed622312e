"""What is to be trained, and what the command line changes of it."""

from mpitrain.job.job import EMA_PREFIX as EMA_PREFIX
from mpitrain.job.job import Job as Job
from mpitrain.job.overrides import AUTO_WHERE as AUTO_WHERE
from mpitrain.job.overrides import Overrides as Overrides
from mpitrain.job.overrides import apply_overrides as apply_overrides

"""What strategies cannot do: a table of feature x strategy x world, from which every refusal is taken.

A feature is something that a job, a launch or a model asks for. The first of its rules that fits a strategy in a world
says why it is refused; where none fits, it works. What a job asks for, and the sentence around a reason, stand in
`job/asked.py`. Invariants: a rule asks a strategy for what `Strategy` answers, never for its class or name, so that a
new strategy needs no row here; `docs/features.py` is written by hand, and tried against this table by running it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.strategies.base import MOST_NONFINITE, Strategy

MPI, THREADS, VIRTUAL, LOOP = WORLDS = ("mpi", "threads", "virtual", "loop")


def always(one: Strategy) -> bool:
    """Every strategy is refused."""
    return True


class Rule(NamedTuple):
    """When a strategy is refused, and why, a format of it as `one`. `said`: the whole message, a format of
    `job/asked.py`, where that of the feature does not fit."""

    when: Callable[[Strategy], bool]
    why: str
    worlds: tuple[str, ...] = WORLDS
    said: str = ""

    def reason(self, strategy: Strategy) -> str:
        """Why this strategy is refused."""
        return self.why.format(one=strategy)


UNUSED_IN_PARTS = (
    "allreduce() cannot accumulate where the loss leaves out parameters in some batches: DDP exchanges the gradients "
    "of those that the last batch uses; give a larger batch_size, or use sync()"
)
_SEVERAL_STEPS = "a step function takes several steps in a batch, each from where the one before has led"
_CORRECTED = Rule(
    lambda one: one.clips_mean and bool(one.correction),
    "{one.correction} changes gradients before their mean is clipped, and here no gradient is ever stale: leave "
    "damping out",
)
_ROWS_ON_SERVERS = (
    Rule(lambda one: one.aggregates, 'aggregate="node" passes whole gradients on, and rows of tables are asked for by '
         "each worker: leave it out"),
    Rule(lambda one: one.has_servers and (one.elastic or one.steps_on_workers), "{one} moves all parameters on every "
         "worker, and rows of tables are trained by servers alone"),
    Rule(lambda one: one.moves, "{one} lets workers move their parameters between reads, and they hold the rows of one "
         "batch alone: leave push_every and pull_every out"),
    Rule(lambda one: bool(one.correction), "{one.correction} corrects a gradient by what its worker has read, and of "
         "tables no server remembers that: use another damping"),
    Rule(lambda one: one.has_servers, "in a loop of your own nobody knows which rows the next batch looks up, which "
         "mpitrain.train does", (LOOP,)),
)  # fmt: skip

REFUSED: dict[str, tuple[Rule, ...]] = {
    # ---- the strategy itself
    "over MPI": (  # threads are asked as ranks of MPI are, too
        Rule(lambda one: one.stragglers == "abort", "no MPI worker can stop a backward pass that is under way; use "
             'stragglers="finish", or simulate', (MPI, LOOP)),
    ),
    "one process": (
        Rule(lambda one: one.splits_model, "--threads trains whole models, one a thread, and this strategy cuts one "
             "model among ranks: run it over MPI", (THREADS,),
             "{strategy}: {why} (mpitrain launch -n {num_ranks} train ...)"),
        Rule(lambda one: one.aggregates, "between threads no message travels, so there is nothing to aggregate: leave "
             "aggregate out", (THREADS,)),
        Rule(lambda one: one.codes_allreduce, "between threads no gradient travels, so a codec has nothing to make "
             "smaller: leave codec out", (THREADS,)),
    ),
    "own loop": (
        Rule(lambda one: one.reduces, "its workers meet in every step, and a loop of your own may end earlier on one "
             "of them; use train()", (LOOP,)),
        Rule(lambda one: one.aggregates, 'aggregate="node" takes ranks that only `train` starts, not `wrap`: leave it '
             "out", (LOOP,)),
        Rule(lambda one: one.has_servers and one.warms_up, "a warm-up is counted in epochs of data, which only `train` "
             "knows, not `wrap`", (LOOP,)),
        Rule(lambda one: one.splits_model, "it splits the model itself, which `wrap` never does; use `mpitrain train`, "
             'or torch\'s own classes after torch.distributed.init_process_group("mpi4py")', (LOOP,)),
    ),
    "several models": (
        Rule(lambda one: one.has_servers, "servers serve the first model", (LOOP,)),
        Rule(lambda one: one.sends_messages, "peers hold one model", (LOOP,)),
    ),
    "--ft": (
        Rule(lambda one: one.aggregates, "{one} cannot: the workers of a node wait for one another, and for their "
             "aggregator. Leave either out"),
    ),
    # ---- fields of a job
    "accumulate": (
        Rule(lambda one: one.push_every > 1 and not one.elastic, "push_every={one.push_every} pushes the sum over "
             "several batches already, and between them the worker moves its parameters; accumulate pushes one mean "
             "of batches on the same parameters: leave either out"),
        Rule(lambda one: one.has_stages, "a pipeline adds up the gradients of its microbatches without communication "
             "in between already; to accumulate, multiply batch_size= and microbatches= by the same number"),
    ),
    "accumulate, find_unused_parameters": (Rule(lambda one: one.all_reduces, UNUSED_IN_PARTS),),
    "checkpoint_every": (
        Rule(lambda one: one.never_meets, "peers that never wait for one another write checkpoints when they meet: "
             "give resync=R, or leave out"),
    ),
    "clip_norm": (
        Rule(lambda one: one.reduces, "the norm is that of the whole gradient, of which workers know the dense part "
             "and servers the rows: use clip_value, or sync()"),
        _CORRECTED,
    ),
    "clip_value": (_CORRECTED,),
    "device": (
        Rule(always, "says where workers compute, and a simulation computes what they would on the host: leave it out",
             (VIRTUAL,)),
    ),
    "log=mllog": (Rule(always, "holds times of a clock on the wall, and a simulation has none", (VIRTUAL,)),),
    "on_nonfinite=skip": (
        Rule(lambda one: one.sums_on_nodes, f'on_nonfinite="skip" has servers give up a worker that sends '
             f"{MOST_NONFINITE} such gradients in a row, and {{one}} has what it sends in a sum with others: use "
             '"stop", or leave aggregate out'),
    ),
    "patience": (
        Rule(lambda one: one.never_meets, "peers that never wait for one another agree to end when they meet: give "
             "resync=R, or leave patience out"),
    ),
    "precision=float16 on a CPU": (
        Rule(always, 'precision="float16" (--precision) scales the loss on an accelerator, and this run computes on a '
             'CPU: use "bfloat16", which needs no scale'),
    ),
    "precision=float16": (
        Rule(lambda one: one.codes_allreduce, "{one}: a codec keeps what it does not send, and with "
             'precision="float16" that would be of gradients that have overflowed: use "bfloat16"'),
    ),
    "scheduler by a metric": (
        Rule(lambda one: one.never_meets, "peers that never wait for one another are told what a scheduler goes by "
             "when they meet: give resync=R, or use a scheduler that goes by samples"),
    ),
    "scheduler by a metric by the clock": (
        Rule(lambda one: one.sends_messages and not one.has_servers and not one.asynchronous, "the first peer alone "
             "knows the time, and the others cannot be told in the middle of a step what a scheduler goes by: count "
             "validate_every in epochs or samples"),
    ),
    "step": (
        Rule(lambda one: one.all_reduces, "a step function with several optimizers exchanges gradients in its middle, "
             "while it draws from the one random generator of the process: run it over MPI, or under localsgd()",
             (THREADS,), "--threads: {why}"),
        Rule(lambda one: one.codes_allreduce, "a codec codes the gradients of one backward pass a step; use "
             "allreduce() without one"),
        Rule(lambda one: one.begins_together, "in its first steps gradients are averaged in the middle of a step, and "
             "later not: leave start out, or use allreduce()"),
        Rule(lambda one: one.has_servers and not (one.steps_in_batch or one.elastic or one.steps_on_workers),
             f"{_SEVERAL_STEPS}, and to servers a batch is one gradient, but under sync() without codec, damping or "
             'aggregation; use that, optimizer="worker" of this strategy, localsgd() or allreduce()'),
        Rule(lambda one: one.splits_model or (one.sends_messages and not one.has_servers), f"{_SEVERAL_STEPS}, and "
             'here a batch is one gradient; use allreduce(), localsgd() or async(optimizer="worker")'),
        Rule(lambda one: one.all_reduces, "the step function averages gradients in the middle of a step, and in "
             "virtual time ranks compute one after another: use `mpitrain train`", (VIRTUAL,)),
    ),
    "step, on_nonfinite=skip": (
        Rule(lambda one: one.steps_in_batch, "servers leave out a gradient that is not finite, and here others wait "
             'for it in the middle of a batch: use on_nonfinite="stop", or optimizer="worker"'),
    ),
    "sync_batchnorm": (
        Rule(always, "sync_batchnorm exchanges statistics in the middle of a forward pass through torch.distributed, "
             "which knows processes and no threads: leave it out, or run over MPI", (THREADS,), "--threads: {why}"),
        Rule(lambda one: one.splits_model and not one.gathers_layers, "its layers may be slices or stages, of which "
             "each rank holds another; use allreduce() or sharded()"),
        Rule(lambda one: not one.all_reduces and not one.gathers_layers, "its workers do not meet in the forward pass, "
             "so there is no common batch to take statistics of; use allreduce() or sharded()"),
    ),
    "sync_batchnorm of several workers": (
        Rule(always, "sync_batchnorm looks at the batches of all ranks in the middle of a forward pass, and in virtual "
             "time ranks compute one after another: leave it out of a simulation", (VIRTUAL,)),
    ),
    "trace": (
        Rule(always, "a trace is of a process with one rank: leave --trace out, run over MPI, or look at the process "
             "with a profiler of threads", (THREADS,)),
    ),
    "validate_every in seconds": (
        Rule(always, "counts seconds of a clock, and virtual time has none: count epochs or samples", (VIRTUAL,)),
    ),
    # ---- options of the command line
    "--heartbeat-s": (
        Rule(lambda one: not one.has_servers, "how long a server waits for a silent worker, and {one} has no servers: "
             "leave it out, or choose a strategy with servers", (MPI, THREADS)),
        Rule(lambda one: one.needs_all, "how long a silent worker keeps its part, and {one} cannot go on without one: "
             "leave it out, or use sync()", (MPI, THREADS)),
    ),
    "--checkpoint-pause": (
        Rule(always, "saves memory of a run whose checkpoints are copied, and a simulation copies none: leave it out",
             (VIRTUAL,)),
    ),
    "--go-back": (
        Rule(lambda one: one.has_servers or one.sends_messages, "no two workers of {one} must hold the same, so "
             "nothing is compared: leave it out, or choose allreduce() or a split model"),
        Rule(always, "in virtual time no bit flips: leave it out", (VIRTUAL,)),
    ),
    "--inject into a process": (
        Rule(always, "ends or stops a process, and with --threads all replicas are one: use raise(...) or wedge(...), "
             "or run it over MPI", (THREADS,)),
    ),
    "--inject torn": (
        Rule(always, "with --threads payloads are handed over where they are, and nothing can tear them: run it over "
             "MPI", (THREADS,)),
    ),
    "--inject flip": (
        Rule(lambda one: one.has_servers or one.sends_messages, "no two workers of {one} must hold the same, so nobody "
             "would see it: choose allreduce() or a split model"),
        Rule(always, "in virtual time no bit flips: leave it out", (VIRTUAL,)),
    ),
    "--inject flip of payloads": (
        Rule(always, "with --threads payloads are handed over where they are, and none is damaged on its way: run it "
             "over MPI", (THREADS,)),
    ),
    "--checksums": (
        Rule(lambda one: one.has_servers or one.sends_messages, "checks what workers exchange in collectives, and "
             "those of {one} send messages: leave it out, or choose allreduce(), localsgd(), sharded() or tensor()"),
        Rule(lambda one: one.has_stages, "checks what ranks exchange in collectives, and the stages of {one} send one "
             "another messages: leave it out"),
        Rule(always, "with --threads payloads are handed over where they are: leave it out, or run it over MPI",
             (THREADS,)),
        Rule(always, "in virtual time no bit flips: leave it out", (VIRTUAL,)),
    ),
    "--inject into pushes": (
        Rule(lambda one: not one.has_servers, "this needs a server, and {one} has none"),
    ),
    "--inject into messages": (
        Rule(lambda one: not one.sends_messages, "workers of {one} meet in collectives, and are sent no messages that "
             "could be read late: order slow(...) or pause(...)"),
    ),
    "--inject into workers": (
        Rule(lambda one: one.splits_model, "--inject delays or fails workers that hold whole models, and those of "
             "{one} hold parts: leave it out, or choose a strategy whose workers hold whole models"),
    ),
    # ---- models
    "sparse": (
        *_ROWS_ON_SERVERS,
        Rule(lambda one: one.codes_allreduce, "a codec codes whole gradients; use allreduce() without one"),
        Rule(lambda one: not one.has_servers and not one.all_reduces, "{one.name}() sends whole gradients or "
             "parameters; allreduce() and the strategies with servers send touched rows"),
    ),
    "served": (
        *_ROWS_ON_SERVERS,
        Rule(lambda one: not one.has_servers, "its rows live on parameter servers, and {one.name}() has none"),
    ),
    "a copy of tables": (Rule(lambda one: one.has_servers, "come from servers one batch at a time"),),
    "changes in place": (  # of parameters by a forward pass, as `Embedding(max_norm=)` makes them
        Rule(lambda one: one.all_reduces, "each worker changes what its own batch looks up, so that their replicas "
             "part"),
        Rule(lambda one: one.splits_model and not one.has_stages, "a rank holds a shard of a layer, and a pass "
             "computes with what is put together for it"),
        Rule(lambda one: one.has_servers and not one.elastic, "{one.name}() has servers hold the parameters, whose "
             "next answer undoes it"),
        Rule(lambda one: one.sends_messages and not one.has_servers and not one.mixes, "{one.name}() tells the others "
             "what an optimizer's step has changed, not a forward pass"),
    ),
}  # fmt: skip


def refusal(feature: str, strategy: Strategy, world: str) -> Rule | None:
    """The rule by which a strategy is refused a feature in a world; None where that works."""
    return next((one for one in REFUSED[feature] if world in one.worlds and one.when(strategy)), None)


def why_not(feature: str, strategy: Strategy, world: str) -> str:
    """Empty, or why a strategy cannot do this in this world."""
    rule = refusal(feature, strategy, world)
    return "" if rule is None else rule.reason(strategy)
